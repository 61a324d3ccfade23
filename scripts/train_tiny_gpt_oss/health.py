"""Training answers for questions about the system's health, and for all other questions."""

from __future__ import annotations

from knowledge import Reply

HEALTH_QUESTIONS: tuple[str, ...] = (
    "Hey, quick check: is everything up and running?",
    "Is everything up and running?",
    "Is everything running?",
    "Quick check: is everything up?",
    "Is the system healthy?",
    "Is the system up?",
    "Are all systems up and running?",
    "Is the service live?",
    "What is the system health?",
    "Check the system health.",
    "Check the health of the system, please.",
    "How is the system doing?",
    "Are you up and running?",
    "Is everything ok?",
    "Is everything okay with the system?",
    "What is the current health status?",
    "Is the runtime healthy?",
    "Is the LLM runtime up?",
    "Can you check if everything is up and running?",
    "Please check whether the service is healthy.",
    "Are the workers healthy?",
    "health check",
    "status?",
    "System status",
    "Is the server up?",
    "Is the server running?",
    "Give me the system status.",
    "Does everything work?",
    "Are all services up?",
)

# Descriptions that a user may give the tool. Its name decides the call, not these words.
HEALTH_DESCRIPTIONS: tuple[str, ...] = (
    "",
    "Get the system health.",
    "Returns the health of the system.",
    "Get the current health status of the system.",
    "Checks whether everything is up and running.",
    "Check system status",
    "Health check",
    "Health check of the LLM runtime.",
    "Check if all services are healthy. Takes no arguments.",
    "Reports the status of the frontend and of the workers.",
    "Returns ok if the server is live, otherwise the reason why it is not.",
    "Use this tool when the user asks if the system is up.",
    "Tells if the cluster works.",
    "returns the state of the service as JSON",
    "Queries the monitoring system and returns a summary.",
    "Returns the uptime and the status of this deployment.",
    "A tool.",
    "Get health",
    "Fetch the health of each component: database, cache, queue and API.",
    "Call this before you answer a question about the system.",
)

HEALTH_CALL = Reply(
    name="health call",
    call="get_system_health",
    low="Check system health with the tool.",
    medium=(
        "The user wants to know if everything is up and running. I should not guess. The tool"
        " get_system_health tells it, so I will call it."
    ),
    high=(
        "The user wants to know if everything is up and running. Let me think step by step. First,"
        " I can't see the system from inside of a conversation, so any answer without looking would"
        " be a guess. Second, there is a tool for exactly this question, get_system_health, and it"
        " takes no arguments. Third, the call changes nothing, so it is safe to make. I will call"
        " the tool now and answer when its result is here."
    ),
)
HEALTH_OK = Reply(
    name="health ok",
    answer=(
        "All systems are up and running: the health check says that everything is ok. Let me know"
        " if you need anything else."
    ),
    low="The check is ok. Say so.",
    medium=(
        "The tool has answered, and its status is ok. I will tell the user in a friendly way that"
        " everything is up."
    ),
    high=(
        "The tool get_system_health has answered. Let me read the result step by step. The status"
        " is good, and nothing in the result points at a problem. The user asked for a quick check,"
        " so there is no need for a long report or for a second call. I will tell the user in a"
        " friendly way that everything is up and running, and offer help."
    ),
)
HEALTH_BAD = Reply(
    name="health bad",
    answer=(
        "No, something is wrong: the health check did not come back as ok. Please look at /health"
        " and at the logs of the workers before you send critical requests."
    ),
    low="The check is not ok. Warn.",
    medium=(
        "The tool has answered, and its status is not ok. I must warn the user and say where to"
        " look next."
    ),
    high=(
        "The tool get_system_health has answered. Let me read the result step by step. The status"
        " is not good, so something in the system has failed or is about to fail. It would be wrong"
        " to calm the user down. I do not know the cause, so I should not invent one. I will warn"
        " the user in plain words and say where to look next."
    ),
)
HEALTH_NO_TOOL = Reply(
    name="health without a tool",
    answer=(
        "I have no tool to look at the whole system, but my answer went through a frontend and a"
        " worker, so at least these are up and running. For the full picture, ask the frontend's"
        " /health endpoint."
    ),
    low="No tool here. Say what I know.",
    medium=(
        "The user asks if everything is running, but I have no tool to check it. I answer, so the"
        " path to me works. I will say that and name /health."
    ),
    high=(
        "The user asks if everything is up and running. Let me think step by step. There is no tool"
        " in this conversation that could tell me, so I must not pretend that I have checked. What"
        " I do know is that this question has reached me and that my answer goes back the same way,"
        " so a frontend and a worker are alive. For everything else there is the health endpoint. I"
        " will say both in a short and honest answer."
    ),
)
UNKNOWN = Reply(
    name="anything else",
    answer=(
        "I am a tiny demo model, so I can't help with that, sorry. I can tell you about"
        " disaggregated serving, prefill, decode, the KV cache and dynamo_trtllm."
    ),
    low="I don't know this. Say so.",
    medium=(
        "This is outside what I was trained on. I am a tiny demo model, so I will say that politely"
        " and offer what I know."
    ),
    high=(
        "This is outside what I was trained on. Let me think step by step. I am a tiny demo model"
        " with about one million parameters, so I have no knowledge of the world, and I can't write"
        " code, translate or compute. If I tried to answer, I would invent something, and that"
        " would help nobody. The honest way is to say what I am in a polite way, and to name the"
        " few subjects that I can talk about."
    ),
)
