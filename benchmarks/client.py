"""Load client for OpenAI-compatible servers: sends many streamed chat requests and prints latencies
and throughput.

python -m benchmarks.client --url http://localhost:8000 --concurrency 32 --requests 320 \\
  --isl 128 --osl 256

Closed loop: --concurrency requests are always active. Open loop: --rate sends this many requests
per second (Poisson), however fast the server answers, and latencies count from the planned time.
--processes splits the load among several client processes. The output says when one client process
is not enough.

Variables, all optional: DYN_TRTLLM_API_KEY has the API key to send. For https:// servers,
SSL_CERT_FILE names the CAs to trust; DYN_TRTLLM_TLS_CLIENT_CERT_FILE and
DYN_TRTLLM_TLS_CLIENT_KEY_FILE name a client certificate and its key.
"""

from __future__ import annotations

import argparse
import sys
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

import msgspec
import orjson
import uvloop

from dynamo_trtllm.protocol.errors import ConfigError

from .client_shards import AllRequestsFailed, measure_shards
from .credentials import CERTIFICATE_VARIABLE, KEY_VARIABLE, VARIABLE, open_url
from .interrupts import Interrupts
from .load_client import Load, measure_load
from .summary import table


def choose_model(url: str, wanted: str | None) -> tuple[str, int | None]:
    """Choose the model to send requests to.

    Args:
        url: address of the server.
        wanted: name of the model; None chooses the only served one.

    Returns:
        The model's name, and its context length in tokens or None if the server does not list it.

    Raises:
        SystemExit: with an error message, if there is no such model or no server.
    """
    try:
        with open_url(url.rstrip("/") + "/v1/models", 10) as answer:
            models = {
                str(model["id"]): model.get("max_model_len")
                for model in orjson.loads(answer.read())["data"]
            }
    except HTTPError as exc:
        if exc.code == HTTPStatus.UNAUTHORIZED:
            raise SystemExit(f"{url} needs an API key. Set {VARIABLE}, or correct it.") from exc
        if exc.code == HTTPStatus.FORBIDDEN:
            raise SystemExit(
                f"{url} rejects this client: {exc.read().decode(errors='replace')}. Set {VARIABLE}"
                f" to a key with scope api or all, or {CERTIFICATE_VARIABLE} and {KEY_VARIABLE}."
            ) from exc
        if wanted is not None:
            return wanted, None
        raise SystemExit(f"{url} does not list its models ({exc}). Pass --model.") from exc
    except ConfigError as exc:
        raise SystemExit(exc.message) from exc
    except OSError as exc:
        reason = getattr(exc, "reason", exc)  # URLError wraps the error of the socket
        raise SystemExit(
            f"No server answers at {url} ({reason}). Start a deployment or pass --url."
        ) from exc
    except (HTTPException, ValueError, LookupError, TypeError) as exc:
        raise SystemExit(
            f"{url} is not the address of an OpenAI-compatible server ({exc}). Pass --url."
        ) from exc
    names = ", ".join(models) or "none"
    if wanted is None and len(models) != 1:
        raise SystemExit(f"Several or no models are available at {url}: {names}. Pass --model.")
    if wanted is not None and wanted not in models:
        raise SystemExit(f"Model {wanted!r} not found at {url}. Available: {names}.")
    name = wanted or next(iter(models))
    return name, models[name]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.client",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_load(parser)
    add = parser.add_argument
    add("--processes", type=int, default=1, help="number of client processes (default: 1)")
    add(
        "--pid",
        action="append",
        default=[],
        metavar="NAME=PID",
        help="measure the CPU time of this process and its children; may be repeated",
    )
    add("--records", type=Path, help="write one JSON line per request to this file")
    add("--json", action="store_true", help="print the results as one JSON line")
    return parser.parse_args()


def _add_load(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that define the load."""
    add = parser.add_argument
    add(
        "--url",
        default="http://localhost:8000",
        help="address of the server (default: http://localhost:8000)",
    )
    add("--model", help="name of the model; default: the only served model")
    add("--concurrency", type=int, default=1, help="concurrent requests, closed loop (default: 1)")
    add(
        "--rate",
        type=float,
        default=0.0,
        help="requests per second, open loop; 0: closed loop (default: 0)",
    )
    add("--requests", type=int, default=16, help="number of measured requests (default: 16)")
    add(
        "--seconds",
        type=float,
        default=120.0,
        help="send no new request after this time (default: 120)",
    )
    add("--warmup", type=int, default=0, help="requests before the measured ones (default: 0)")
    add(
        "--isl",
        type=int,
        default=128,
        help="words of the prompt, about as many as its tokens (default: 128)",
    )
    add("--osl", type=int, default=64, help="max_tokens (default: 64)")
    add(
        "--timeout-s",
        type=float,
        default=120.0,
        help="longest wait for one response (default: 120)",
    )
    add("--fresh-connections", action="store_true", help="open a new connection for every request")
    add(
        "--no-ignore-eos",
        action="store_true",
        help="don't send ignore_eos, for servers that don't support it",
    )
    add("--extra", type=orjson.loads, default={}, help="JSON object that is added to every body")
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of the prompts; 0: different prompts in every run (default: 0)",
    )


def main() -> None:
    """Run the command line. The exit status is 1 if no request succeeded."""
    args = _arguments()
    load = Load(
        url=args.url,
        model=choose_model(args.url, args.model)[0],
        concurrency=args.concurrency,
        rate=args.rate,
        requests=args.requests,
        seconds=args.seconds,
        isl=args.isl,
        osl=args.osl,
        timeout_s=args.timeout_s,
        fresh_connections=args.fresh_connections,
        ignore_eos=not args.no_ignore_eos,
        extra=args.extra,
        seed=args.seed,
    )
    pids: dict[str, int] = {}
    for option in args.pid:
        name, _, pid = option.partition("=")
        pids[name] = int(pid)
    if args.processes > 1:
        try:
            with Interrupts() as interrupts:
                summary, records = measure_shards(
                    load,
                    processes=args.processes,
                    warmup=args.warmup,
                    pids=pids,
                    interrupts=interrupts,
                )
        except AllRequestsFailed as exc:
            raise SystemExit(f"{__package__}.client: {exc}") from exc
    else:
        summary, records = uvloop.run(measure_load(load, warmup=args.warmup, pids=pids))
    if args.records:
        encode = msgspec.json.Encoder(enc_hook=list).encode
        args.records.write_bytes(b"".join(encode(record) + b"\n" for record in records))
    sys.stdout.write(orjson.dumps(summary).decode() + "\n" if args.json else table(summary))
    raise SystemExit(0 if summary["ok"] else 1)


if __name__ == "__main__":
    main()
