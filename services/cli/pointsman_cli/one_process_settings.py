"""Settings of `pointsman serve`, apart from what it runs: they need neither router nor gateway."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class OneProcessSettings(BaseSettings):
    """Settings of `pointsman serve`. Router and gateway also read their own variables, except the gateway's `routers`."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_SERVE_")

    log_level: str = Field("info", description="debug, info, warning or error")
