"""Output formats as clients send them: tool arguments, extraction schemas, patterns of usual
values, grammars.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def required(**properties: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def optional(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties}


def string(**keywords: Any) -> Schema:
    return {"type": "string", **keywords}


def listed(items: Schema, **keywords: Any) -> Schema:
    return {"type": "array", "items": items, **keywords}


def fields(count: int, **keywords: Any) -> dict[str, Schema]:
    return {
        f"customer_field_{number}": string(description="a value " * 20, **keywords)
        for number in range(count)
    }


TEXT = string()
COUNT = {"type": "integer", "minimum": 0, "maximum": 100_000}
NULLABLE = {"anyOf": [string(maxLength=500), {"type": "null"}]}
ADDRESS = required(
    street=string(maxLength=200),
    city=string(maxLength=100),
    zip=string(pattern=r"^\d{5}(-\d{4})?$"),
    country=string(pattern="^[A-Z]{2}$"),
)
COUNTRIES = [f"{first}{second}" for first in "ABCDEFGHIJ" for second in "ABCDEFGHIJKLMNOPQRST"]
COLUMN_SIZES = (10, 20, 32, 50, 64, 100, 128, 200, 255, 500, 1000, 2000, 4000)

REAL_PATTERNS = {
    "date": r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$",
    "time": r"^\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?(Z|[+-]\d{2}:?\d{2})?$",
    "email": r"^[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}$",
    "loose email": r"^\S+@\S+\.\S+$",
    "long email": (
        r"^[a-zA-Z0-9.!#$%&'*+/=?^_`{|}~-]+@[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
        r"(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)*$"
    ),
    "phone": r"^\+?1?[-.\s]?\(?\d{3}\)?[-.\s]?\d{3}[-.\s]?\d{4}$",
    "E.164": r"^\+[1-9]\d{1,14}$",
    "uuid": (
        r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-5][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"
    ),
    "sha256": "^[a-f0-9]{64}$",
    "color": "^#(?:[0-9a-fA-F]{3}){1,2}$",
    "url": (
        r"^https?://(www\.)?[-a-zA-Z0-9@:%._+~#=]{1,256}\.[a-zA-Z0-9()]{1,6}([-a-zA-Z0-9()@:%_+.~#?&/=]*)$"
    ),
    "ipv4": r"^((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)$",
    "ipv6": "^(([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,7}:|::)$",
    "semantic version": (
        r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?"
        r"(\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?$"
    ),
    "slug": "^[a-z0-9]+(?:-[a-z0-9]+)*$",
    "label": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
    "user name": "^[a-zA-Z][a-zA-Z0-9_-]{2,31}$",
    "name": "^[A-Z][a-z]+( [A-Z][a-z]+)*$",
    "words": r"^(\w+\s?){1,10}$",
    "currency": r"^\$?\d{1,3}(,\d{3})*(\.\d{2})?$",
    "iban": r"^[A-Z]{2}\d{2} ?[A-Z0-9]{4}( ?[A-Z0-9]{4}){2,6}( ?[A-Z0-9]{1,3})?$",
    "base64": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "path": r"^(/[^/\x00]+)+/?$",
    "tweet": "^.{1,280}$",
    "sentence": r"^[A-Z][\w\s,.;:'-]{10,200}[.!?]$",
    "key and value": r"^\w+: .+$",
    "lines": r"^(- .+\n){3,10}$",
    "tagged": r"<think>[^<]*</think>\n\n<answer>(yes|no)</answer>",
    "score": r"Reasoning: .{0,500}\nScore: ([1-9]|10)",
    "choices": "|".join(
        f"the {number}th choice, of several words that describe what it means"
        for number in range(60)
    ),
}

REAL_SCHEMAS: dict[str, Schema] = {
    "30 properties": optional(**fields(30)),
    "60 required properties": required(**fields(60)),
    "100 optional properties": optional(**fields(100)),
    "enum of 200": required(country={"enum": COUNTRIES}, name=TEXT),
    "enum of 200 texts": required(
        kind={"enum": [f"category {number} of the catalog" for number in range(200)]}
    ),
    "length 10,000": required(summary=string(maxLength=10_000), title=string(maxLength=120)),
    "lengths of a database": required(
        **{f"column_{size}": string(maxLength=size) for size in COLUMN_SIZES}
    ),
    "equal lengths": optional(**fields(50, minLength=1, maxLength=255)),
    "anyOf of 10": {
        "anyOf": [
            required(kind={"const": f"kind {n}"}, **fields(5, maxLength=200)) for n in range(10)
        ]
    },
    "nested arrays": listed(
        listed(listed({"type": "number"}, maxItems=100), maxItems=100), maxItems=100
    ),
    "order": required(
        id=string(pattern="^ORD-[0-9]{6}$"),
        items=listed(
            required(sku=string(pattern="^[A-Z]{3}-[0-9]{4}$"), quantity=COUNT, note=NULLABLE),
            minItems=1,
        ),
        shipping=ADDRESS,
        billing=ADDRESS,
        placed=string(format="date-time"),
    ),
    "resume": required(
        name=string(minLength=1, maxLength=100),
        email=string(format="email"),
        skills=listed(string(maxLength=50), maxItems=50),
        jobs=listed(
            required(company=TEXT, title=TEXT, start=string(format="date"), end=NULLABLE),
            maxItems=30,
        ),
    ),
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": required(value=TEXT, children=listed({"$ref": "#/$defs/node"}))},
    },
    "20 different patterns": required(
        **{
            name.replace(" ", "_"): string(pattern=pattern)
            for name, pattern in list(REAL_PATTERNS.items())[:20]
        }
    ),
    "30 equal patterns": required(**fields(30, pattern=REAL_PATTERNS["date"])),
    "headers": {
        "type": "object",
        "patternProperties": {"^X-[A-Za-z-]+$": TEXT},
        "additionalProperties": False,
    },
    "30 nested objects": required(**{f"section_{n}": optional(**fields(20)) for n in range(30)}),
}

REAL_GRAMMARS = {
    "JSON": (
        r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
    ),
    "SQL": (
        r"""
root ::= "SELECT " columns " FROM " name (" WHERE " condition)? (" LIMIT " [0-9]+)? ";"
columns ::= "*" | name (", " name)*
condition ::= comparison ((" AND " | " OR ") comparison)*
comparison ::= name " " ("=" | "<" | ">" | "<=" | ">=" | "LIKE") " " literal
literal ::= "'" [^']* "'" | [0-9]+ ("." [0-9]+)?
name ::= [a-zA-Z_] [a-zA-Z0-9_]*
"""
    ),
    "lists": (
        r"""
root ::= item+
item ::= "- " [^\r\n]+ "\n"
"""
    ),
    "chess": (
        r"""
root ::= [0-9]+ ". " move " " move "\n" ([0-9]+ ". " move " " move "\n")*
move ::= ([NBKQR]? [a-h]? [1-8]? "x"? [a-h] [1-8] ("=" [NBKQR])? | "O-O" "-O"?) [+#]?
"""
    ),
}
