"""The name of a tenant's session, as routers store it and engines get it: TENANT/SESSION_ID. Pure."""

from __future__ import annotations


def session_name(tenant: str, session_id: str) -> str:
    """Return the name of a tenant's session, which no session of another tenant has; empty without an id.

    The tenant ends at the first "/". One that has a "/" itself is escaped; names of all other tenants are as clients and keys
    files have them, so that names which earlier versions have stored stay those of their sessions.
    """
    if not session_id:
        return ""
    if "/" in tenant or "%" in tenant:
        tenant = tenant.replace("%", "%25").replace("/", "%2F")
    return f"{tenant}/{session_id}"


def tenant_and_id(name: str) -> tuple[str, str]:
    """Return the tenant and the session id of a name."""
    tenant, _, session_id = name.partition("/")
    if "%" in tenant:
        tenant = tenant.replace("%2F", "/").replace("%25", "%")
    return tenant, session_id
