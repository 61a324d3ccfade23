"""Describe the tools of Anthropic's API that have a type in place of a schema.

The client runs some of these tools. They become functions with the parameters of Anthropic's
documentation. `hosted_tools` leaves the others out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

# A type ends with the date of its version.
_TYPE: Final = re.compile(r"(bash|text_editor|memory)_(\d{8})")
# The first version of the text editor that has `insert_text`. In earlier versions, `new_str` is the
# inserted text.
_FIRST_INSERT_TEXT: Final = "20250429"
# The last version of the text editor that can undo an edit.
_LAST_UNDO: Final = "20250124"

_TEXT: Final = {"type": "string"}
_LINE: Final = {"type": "integer", "minimum": 0}
_FILE_PROPERTIES: Final[Mapping[str, Any]] = {
    "path": {"type": "string", "description": "Absolute path of the file or directory."},
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "view: the first and the last line, from 1; -1 is the end.",
    },
    "file_text": {"type": "string", "description": "create: the content of the file."},
    "old_str": {
        "type": "string",
        "description": "str_replace: the text to replace.",
    },
    "new_str": {"type": "string", "description": "str_replace: the new text."},
    "insert_line": _LINE | {"description": "insert: the line after which to insert, from 0."},
}
_INSERT_TEXT: Final = {"type": "string", "description": "insert: the text to insert."}
_FILE_COMMANDS: Final = ("view", "create", "str_replace", "insert")


def client_tool(kind: str, name: Any) -> dict[str, Any] | None:
    """Return the function of a tool. None: the client does not run tools of this type.

    Args:
        kind: the type of the tool, such as "bash_20250124".
        name: the name of the tool as the client sent it. The model of the function checks it.
    """
    match = _TYPE.fullmatch(kind)
    if match is None:
        return None
    family, version = match.groups()
    if family == "bash":
        return _bash(name)
    if family == "memory":
        return _memory(name)
    return _text_editor(name, version)


def _bash(name: Any) -> dict[str, Any]:
    command = {"type": "string", "description": "The command to run."}
    restart = {"type": "boolean", "description": "Start a new shell instead."}
    about = "Run a command in a bash shell, which keeps its state between calls."
    return _function(name, about, {"command": command, "restart": restart}, [])


def _text_editor(name: Any, version: str) -> dict[str, Any]:
    undo = ("undo_edit",) if version <= _LAST_UNDO else ()
    properties = {"command": _one_of(*_FILE_COMMANDS, *undo), **_FILE_PROPERTIES}
    if version >= _FIRST_INSERT_TEXT:
        properties["insert_text"] = _INSERT_TEXT
    else:
        about = "str_replace: the new text. insert: the text to insert."
        properties["new_str"] = _TEXT | {"description": about}
    return _function(name, "View, create and edit text files.", properties, ["command", "path"])


def _memory(name: Any) -> dict[str, Any]:
    properties = {
        "command": _one_of(*_FILE_COMMANDS, "delete", "rename"),
        **_FILE_PROPERTIES,
        "insert_text": _INSERT_TEXT,
        "old_path": {"type": "string", "description": "rename: the present path."},
        "new_path": {"type": "string", "description": "rename: the new path."},
    }
    about = "Read and write files below /memories, which later conversations can read."
    return _function(name, about, properties, ["command"])


def _one_of(*commands: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(commands)}


def _function(
    name: Any,
    description: str,
    properties: Mapping[str, Any],
    required: list[str],
) -> dict[str, Any]:
    schema = {"type": "object", "properties": dict(properties), "required": required}
    return {"name": name, "description": description, "input_schema": schema}
