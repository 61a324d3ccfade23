"""What tests of several folders share: our own processes, fakes of what surrounds a part, and
checks.

A helper that the tests of one folder alone use is a module of that folder. The stand-ins of
TensorRT-LLM and vLLM are packages of their own in `tests/fakes`, which `fake_packages` imports.

Engines
    engines: creates the engines of this package; dynamo_trtllm.testing has requests and checks
    trtllm_engines: three trtllm engines on one fake TensorRT-LLM: aggregated, prefill and decode
    fake_packages: the fakes of TensorRT-LLM and vLLM, imported as a release
    planted_assumptions: wrong assumptions about TensorRT-LLM, as a plugin of pytest
    trtllm_api_usage: records which names of TensorRT-LLM's API the adapter uses
    trtllm_unverified_names: the names among them that no source confirms, by release
    scripted_library: an engine library whose results a test passes in
    loopback_backend: a KV transfer backend between engines of one process
    nixl_import: import NIXL without torch
    kv_index: an index of cached blocks, built from KV events
    torch_sequences: sequences of the torch engine without the engine
    tiny_models, small_tokenizer: model folders with random weights, and a tokenizer

Workers and the request plane
    instances: instances, model cards and KV transfer parameters
    instance_events: the events of discovery, without those about cards
    workers: workers and a frontend's router in one process, with real etcd and NATS
    request_planes: request planes and scripted services
    generator_streams: streams that are written as async generators

The frontend
    frontend_app: a frontend with a scripted router, and a renderer whose tokens are characters
    memory_http: a client of an app without sockets
    messages_client: a client of /v1/messages
    generation_plans: generation plans from request bodies
    model_registry: a model registry, and workers that only send model files
    routing: a router with scripted workers
    admission: a clock, and tasks that wait for a limit
    forecasts: all times that are predicted for a request at one worker
    slo_placements: placements of `--router-mode slo` whose workers report what a test says
    answer_parts: the deltas of an answer, accumulated as a client does
    step_splits: answers to one sequence of tokens that comes in steps of any sizes

Processes, as a user starts them
    cluster: frontends and workers, their log lines and HTTP responses
    launcher_process: the launcher
    fake_children: a launcher whose child processes are fakes
    servers: etcd and nats-server
    etcd_client: reads and writes keys of etcd as another program would
    hub_server: a Hugging Face Hub
    package_index: a package index for pip and uv
    containerfiles: the instructions of the Containerfiles

For all tests
    cases: runs many short cases as one test
    certificates: certificates of servers and clients
    bare_wheel: hides the packages of extras from processes
    transfer_keys: files of KV transfer keys, and a clock that a test moves
    waiting: how long to wait for what normally holds at once
    number_fields: messages in which one number is wrong
    xdist_scheduling: which process of pytest-xdist runs which tests
"""
