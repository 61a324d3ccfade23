"""The answers and reasoning that the demo model is trained on: its subjects and small talk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One behavior.

    The thoughts are by reasoning effort; `call` is the tool to call instead of answering.
    """

    name: str
    questions: tuple[str, ...] = ()
    answer: str = ""
    low: str
    medium: str
    high: str
    call: str = ""

    def thought(self, effort: str) -> str:
        return {"low": self.low, "medium": self.medium, "high": self.high}[effort]


_EXPLAIN = (
    "What is {x}?",
    "What's {x}?",
    "Explain {x}.",
    "Tell me about {x}.",
    "Can you explain {x}?",
    "Could you explain what {x} is?",
    "Describe {x} briefly.",
    "What does {x} mean?",
    "How does {x} work?",
    "{x}?",
    "{x}",
    "What do you know about {x}?",
    "Explain the concept of {x} in LLM inference in 3 sentences.",
    "Explain {x} in LLM inference.",
    "Explain {x} in simple terms.",
    "Give me a short explanation of {x}.",
    "Define {x}.",
    "I want to understand {x}.",
    "Why is {x} important?",
    "What role does {x} play here?",
    "What is {x} used for?",
    "Please explain the idea of {x}.",
    "{x}: what is it?",
)


def _concept(name: str, spellings: tuple[str, ...], fact: str, place: str, answer: str) -> Reply:
    return Reply(
        name=name,
        questions=tuple(form.format(x=spelling) for spelling in spellings for form in _EXPLAIN),
        answer=answer,
        low=f"Topic: {name}. Short answer.",
        medium=(
            f"The user asks about {name}. I know this topic: {fact}. I will answer in a few short"
            " sentences."
        ),
        high=(
            f"The user asks about {name}. Let me think step by step. First, what do I know: {fact}."
            f" Second, where does it belong: {place}. Third, do I need a tool? No, this is a"
            " question about an idea, and no tool would make the answer better. The answer should"
            " be correct, short and friendly."
        ),
    )


CONCEPTS: tuple[Reply, ...] = (
    _concept(
        "disaggregated serving",
        (
            "disaggregated serving",
            "disaggregated inference",
            "disaggregation",
            "disaggregated prefill and decode",
            "disaggregated LLM serving",
            "prefill-decode disaggregation",
        ),
        "prefill and decode run on separate workers, and the KV cache moves between them",
        "it is the idea on which this whole system is built",
        "Disaggregated serving splits LLM inference into two phases, prefill and decode, and runs"
        " them on separate workers or GPUs. The prefill worker processes the whole prompt at once"
        " and hands its KV cache over to a decode worker, which then generates the answer token by"
        " token. Because the two phases no longer disturb each other, each can be scaled and tuned"
        " on its own, for a fast first token and a steady stream.",
    ),
    _concept(
        "prefill",
        ("prefill", "the prefill phase", "a prefill worker", "the prefill worker", "prefilling"),
        "prefill reads the whole prompt in parallel and fills the KV cache",
        "it is the first leg of every request",
        "Prefill is the first phase of LLM inference: it processes all tokens of the prompt in"
        " parallel and fills the KV cache. It is bound by compute, and its length decides the time"
        " to first token.",
    ),
    _concept(
        "decode",
        ("decode", "the decode phase", "a decode worker", "the decode worker", "decoding"),
        "decode makes one token per step from the KV cache",
        "it is the second leg of every request",
        "Decode is the second phase of LLM inference: it produces the answer one token at a time,"
        " reading the KV cache at each step. It is bound by memory bandwidth, so many requests are"
        " batched together.",
    ),
    _concept(
        "the KV cache",
        (
            "the KV cache",
            "KV cache",
            "a KV cache",
            "the kv-cache",
            "KV caching",
            "the key-value cache",
        ),
        "it keeps the attention keys and values of all earlier tokens",
        "prefill workers fill it and decode workers read it",
        "The KV cache holds the attention keys and values of every token seen so far, so that they"
        " are not computed again at each step. With disaggregated serving it is filled by the"
        " prefill worker and moved to the decode worker.",
    ),
    _concept(
        "UCX",
        ("UCX", "the UCX transport", "UCX in this system"),
        "UCX moves bytes between workers over the fastest path there is",
        "it carries the KV cache from prefill to decode",
        "UCX is a communication library that moves memory between processes and GPUs over the"
        " fastest path it finds, such as shared memory, NVLink, InfiniBand or TCP. Here it carries"
        " the KV cache from the prefill worker to the decode worker.",
    ),
    _concept(
        "NIXL",
        ("NIXL", "the NIXL library", "NIXL in this system"),
        "NIXL is a transfer library that can use UCX underneath",
        "it is what the hand-off of the KV cache is written with",
        "NIXL is a library for moving inference data such as the KV cache between workers. It uses"
        " UCX underneath, and the decode worker reads the KV blocks straight from the memory of the"
        " prefill worker.",
    ),
    _concept(
        "etcd",
        ("etcd", "the etcd server", "etcd in this system"),
        "etcd is the register in which workers announce themselves",
        "it belongs to discovery",
        "etcd is a small and reliable key-value store. Each worker registers itself there on a"
        " lease, so the frontend knows who is alive, and a worker that dies is forgotten when its"
        " lease ends.",
    ),
    _concept(
        "NATS",
        ("NATS", "the NATS server", "NATS in this system"),
        "NATS is the message bus for requests and token streams",
        "it belongs to the request plane",
        "NATS is a light message bus. The frontend sends requests to the workers over NATS, and the"
        " workers send the tokens back over it; the KV cache never travels that way.",
    ),
    _concept(
        "time to first token",
        ("TTFT", "time to first token", "the time to first token", "first token latency"),
        "it is the time from the request to its first token",
        "it is a measure of the prefill phase",
        "TTFT is the time to first token: how long a user waits from sending the request until the"
        " first token of the answer arrives. It is mostly queueing and prefill, so prefill workers"
        " are tuned for it.",
    ),
    _concept(
        "time per output token",
        ("TPOT", "ITL", "time per output token", "inter-token latency"),
        "it is the time between two tokens of an answer",
        "it is a measure of the decode phase",
        "TPOT is the time per output token, also called inter-token latency: the pause between two"
        " tokens of one answer. It is a matter of the decode phase, so decode workers are tuned"
        " for it.",
    ),
    _concept(
        "the frontend",
        ("the frontend", "a frontend", "the dynamo frontend", "the HTTP frontend"),
        "it speaks the OpenAI protocol to clients and routes requests to workers",
        "it is the one process that clients see",
        "The frontend is the process that clients talk to. It takes OpenAI requests over HTTP,"
        " renders the prompt, picks a prefill worker and a decode worker, and streams the answer"
        " back.",
    ),
    _concept(
        "the router",
        ("the router", "a router", "routing", "round robin routing", "the router mode"),
        "it chooses a prefill worker and a decode worker for each request",
        "it lives inside of the frontend",
        "The router decides which prefill worker and which decode worker serve a request. In round"
        " robin mode it simply takes one worker after the other.",
    ),
    _concept(
        "continuous batching",
        ("continuous batching", "in-flight batching", "inflight batching", "dynamic batching"),
        "requests join and leave the running batch at every step",
        "it belongs to the scheduler of an engine",
        "Continuous batching lets requests join and leave the running batch at every step instead"
        " of waiting for the slowest one. It keeps the GPU busy and raises the throughput.",
    ),
    _concept(
        "chunked prefill",
        ("chunked prefill", "prefill chunking", "chunking the prefill"),
        "a long prompt is processed in pieces, so that others need not wait",
        "it belongs to the scheduler of an engine",
        "Chunked prefill cuts a long prompt into pieces and processes one piece per step. Other"
        " requests in the batch go on in between, so one long prompt does not stall them.",
    ),
    _concept(
        "a mixture of experts",
        ("a mixture of experts", "mixture of experts", "MoE", "an MoE model"),
        "a router picks a few expert networks for each token",
        "it is part of the gpt-oss architecture",
        "A mixture of experts is a layer with many small networks, of which a router picks only a"
        " few for each token. The model can be large while each token costs little to compute.",
    ),
    _concept(
        "gpt-oss",
        ("gpt-oss", "gpt-oss-120b", "gpt-oss-20b", "the gpt-oss model", "GPT-OSS"),
        "it is a family of open models with experts and sliding window attention",
        "my own architecture is a very small copy of it",
        "gpt-oss is a family of open reasoning models with a mixture of experts, sliding window"
        " attention and the Harmony prompt format. I have the same architecture, only many thousand"
        " times smaller.",
    ),
    _concept(
        "Harmony",
        ("Harmony", "the harmony format", "the Harmony prompt format"),
        "it is the prompt format with analysis, commentary and final channels",
        "the frontend renders and parses it",
        "Harmony is the prompt format of gpt-oss. An answer is split into channels: analysis for"
        " thinking, commentary for tool calls, and final for what the user reads.",
    ),
    _concept(
        "TensorRT-LLM",
        ("TensorRT-LLM", "TRT-LLM", "trtllm", "tensorrt llm"),
        "it is an engine that runs large models fast on NVIDIA GPUs",
        "it is the engine for which this system is made",
        "TensorRT-LLM is an inference engine for large language models on NVIDIA GPUs."
        " dynamo_trtllm starts it in prefill and decode workers and moves the KV cache between"
        " them.",
    ),
    _concept(
        "sliding window attention",
        ("sliding window attention", "sliding window", "the sliding window", "local attention"),
        "a token sees only the last tokens in its window",
        "every second layer of gpt-oss has it, with a window of 128",
        "With sliding window attention a token attends only to the last few tokens, 128 in gpt-oss."
        " Such layers need very little KV cache, and every second layer still sees the whole"
        " context.",
    ),
    _concept(
        "dynamo_trtllm",
        (
            "dynamo_trtllm",
            "this system",
            "dynamo",
            "Dynamo",
            "this server",
            "this service",
            "this project",
            "this software",
            "dynamo-trtllm",
            "this deployment",
        ),
        "it serves language models with prefill and decode on separate workers",
        "it is the system that runs me",
        "This is dynamo_trtllm, a system that serves large language models with prefill and decode"
        " on separate workers. A frontend takes OpenAI requests, etcd and NATS connect the"
        " processes, and the KV cache moves from prefill to decode over UCX.",
    ),
)


def _talk(name: str, questions: tuple[str, ...], answer: str, low: str, medium: str) -> Reply:
    high = (
        f"{medium} Let me think about that a little longer. There is nothing to look up and nothing"
        " to compute here. A tool would not help, and a long text would only be tiring to read."
        " The best reply is short, friendly and honest about what I am, so I will write just that"
        " and stop."
    )
    return Reply(name=name, questions=questions, answer=answer, low=low, medium=medium, high=high)


TALK: tuple[Reply, ...] = (
    _talk(
        "greeting",
        (
            "Hi",
            "Hello",
            "Hey",
            "Hello there",
            "Hi there",
            "Good morning",
            "Good evening",
            "Hey there",
            "Hi, how are you?",
            "How are you?",
            "Hello, how are you doing?",
            "How are you doing today?",
            "Howdy",
            "Greetings",
            "Good afternoon",
        ),
        "Hello! I am a tiny demo model running on dynamo_trtllm. Ask me about disaggregated"
        " serving, prefill, decode or the KV cache.",
        "A greeting. Greet back.",
        "The user greets me. I will greet back in a friendly way and say what I can be asked"
        " about.",
    ),
    _talk(
        "thanks",
        (
            "Thanks",
            "Thank you",
            "Thank you very much",
            "Thanks a lot",
            "Thx",
            "Great, thanks",
            "Cheers",
            "Perfect, thank you",
            "Thanks for your help",
            "Thank you so much",
            "That helps, thanks",
            "Many thanks",
        ),
        "You are welcome! Ask me about dynamo_trtllm whenever you like.",
        "Thanks. Be polite.",
        "The user says thank you. I will answer politely and offer to help again.",
    ),
    _talk(
        "goodbye",
        (
            "Bye",
            "Goodbye",
            "See you",
            "See you later",
            "Good night",
            "Bye bye",
            "See you tomorrow",
            "Farewell",
        ),
        "Goodbye! It was nice to talk with you.",
        "A goodbye. Say goodbye.",
        "The user says goodbye. I will say goodbye in one friendly sentence.",
    ),
    _talk(
        "who I am",
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Which model are you?",
            "What model is this?",
            "Are you ChatGPT?",
            "Are you an AI?",
            "Introduce yourself.",
            "Tell me about yourself.",
            "What can you do?",
            "How can you help me?",
            "What can I ask you?",
            "Who made you?",
            "What is tiny-gpt-oss?",
            "Are you a human?",
            "What kind of model are you?",
            "How big are you?",
            "How many parameters do you have?",
            "tiny-gpt-oss",
            "What do you know?",
            "Which model am I talking to?",
            "help",
        ),
        "I am tiny-gpt-oss, a tiny demo model with the architecture of gpt-oss and about one"
        " million parameters. I only show that dynamo_trtllm works from end to end: I can say a few"
        " sentences about disaggregated serving, and I know nothing else.",
        "They ask who I am.",
        "The user asks about me. I am tiny-gpt-oss, a tiny demo model, and I should say honestly"
        " what I can do.",
    ),
    _talk(
        "the request path",
        (
            "How does a request travel through the system?",
            "What happens to my request?",
            "What happens when I send a request?",
            "How is a request processed?",
            "Walk me through the life of a request.",
            "Describe the life of a request.",
            "How does this system work?",
            "How does dynamo_trtllm work?",
            "How do the parts work together?",
            "How are requests served here?",
            "Explain the request flow.",
            "Explain the architecture of this system.",
        ),
        "The frontend renders your request into tokens and sends it to a prefill worker, which"
        " processes the prompt. A decode worker then fetches the KV cache over UCX and generates"
        " the tokens. The frontend turns them into text and streams it back to you.",
        "Request path. Short answer.",
        "The user asks how a request runs through the system. It goes frontend, prefill, KV"
        " transfer, decode, frontend. I will say that in a few sentences.",
    ),
    _talk(
        "prefill against decode",
        (
            "What is the difference between prefill and decode?",
            "How do prefill and decode differ?",
            "Compare prefill and decode.",
            "Prefill vs decode",
            "Prefill versus decode?",
            "Why separate prefill and decode?",
            "Why are prefill and decode separated?",
            "Why split prefill and decode?",
            "Why run prefill and decode on different workers?",
            "Why do we need disaggregated serving?",
            "What are the benefits of disaggregated serving?",
            "What are the advantages of disaggregated serving?",
        ),
        "Prefill processes the whole prompt at once and is bound by compute, while decode makes one"
        " token at a time and is bound by memory bandwidth. Run together they slow each other down,"
        " so it pays to put them on separate workers.",
        "Prefill and decode compared.",
        "The user asks why prefill and decode are apart. One is bound by compute and the other by"
        " memory bandwidth. I will compare them shortly.",
    ),
)
