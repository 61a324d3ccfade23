"""Run a frontend that checks clients its own way, adds a header, and has a path of its own.

python examples/middleware.py --http-port 8000 --etcd-endpoints … --nats-server …

curl localhost:8000/v1/models                                   # 401
curl localhost:8000/v1/models -H 'Authorization: Bearer alice'  # 200, with X-Tenant: alice
curl localhost:8000/tenants/alice                               # the requests of alice so far
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter

from dynamo_trtllm import Frontend, FrontendConfig, FrontendRequest, FrontendResponse, Refusal

TENANTS = {"alice", "bob"}  # instead of this, ask a database: a hook may await
num_requests: Counter[str] = Counter()


async def check_tenant(request: FrontendRequest) -> Refusal | None:
    # Probes of /live, /ready and /metrics need no tenant.
    if not request.path.startswith("/v1/"):
        return None
    tenant = request.headers.get("authorization", "").removeprefix("Bearer ")
    if tenant not in TENANTS:
        return Refusal(401, "unknown tenant; send its name as the API key", "unknown_tenant")
    num_requests[tenant] += 1
    request.response_headers["X-Tenant"] = tenant
    return None


async def show_tenant(request: FrontendRequest) -> FrontendResponse:
    tenant = request.path_params["name"]
    return FrontendResponse.json({"tenant": tenant, "requests": num_requests[tenant]})


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--etcd-endpoints", default="http://localhost:2379")
    parser.add_argument("--nats-server", default="nats://localhost:4222")
    config = FrontendConfig(http_host="127.0.0.1", **vars(parser.parse_args()))
    routes = {"GET /tenants/{name}": show_tenant}
    Frontend(config, middleware=[check_tenant], routes=routes).run()  # until SIGTERM or Ctrl-C


if __name__ == "__main__":
    main()
