"""Strict schemas of the parts of custom resources that this project uses: any other name is an error. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema

Object = dict[str, Any]

TEXT: Object = {"type": "string", "minLength": 1}


def exactly(required: Object, **optional: Object) -> Object:
    """Return the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def problems(item: Object, specs: Mapping[str, Object]) -> list[str]:
    """Return the violations of one object of the kinds in `specs`, which have the schema of each kind's spec."""
    if item["kind"] not in specs:
        return [f"no schema for {item['kind']}"]
    errors = jsonschema.Draft202012Validator(specs[item["kind"]]).iter_errors(item.get("spec"))
    return [f"spec.{'.'.join(map(str, error.path))}: {error.message}" for error in errors]
