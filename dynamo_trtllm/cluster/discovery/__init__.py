"""Discovery: workers register their instances under a lease, and frontends watch them."""

from dynamo_trtllm.config import environ

# Otherwise gRPC writes lines of its own to stderr at each failed handshake of TLS, also between the
# lines of `--log-format json`. The errors of its calls say the same.
environ.prefer({"GRPC_VERBOSITY": "ERROR"})
