"""lm-eval: likelihood and generation with local-completions, generation with chats."""

import json
import os
import subprocess
from pathlib import Path

from steps import check, run

# A task of our own: those of lm-eval load their data from another host.
DATA = [
    {"question": "Hello", "choices": ["! I am a tiny demo model", "zzzz qqqq"], "answer": 0},
    {"question": "Disaggregated serving", "choices": [" splits prefill", "zzzz"], "answer": 0},
]
COMMON = """
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: data.jsonl}}
test_split: test
doc_to_text: "{{question}}"
"""
LIKELIHOOD = """
output_type: multiple_choice
doc_to_target: answer
doc_to_choice: choices
metric_list: [{metric: acc}]
"""
GENERATION = """
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 16}
metric_list: [{metric: exact_match}]
"""
CHAT = """
output_type: generate_until
doc_to_target: "{{question}}"
generation_kwargs: {until: ["!"], max_gen_toks: 400}
metric_list: [{metric: exact_match}]
"""


def _evaluate(base_url: str, model: str, name: str, kind: str) -> dict:
    _write_task(name, kind, DATA)
    # docs: lm-eval
    command = ["lm_eval", "run", "--model", "local-completions"]
    command += ["--tasks", name, "--include_path", ".", "--model_args"]
    address = f"base_url={base_url}/v1/completions"
    command += [f"model={model},{address},tokenizer={os.environ['TOKENIZER']}"]
    # docs: end
    return _results(command, name)


def _evaluate_chat(base_url: str, model: str, name: str, kind: str) -> dict:
    _write_task(name, kind, DATA[:1])
    # docs: lm-eval-chat
    command = ["lm_eval", "run", "--model", "local-chat-completions", "--apply_chat_template"]
    command += ["--tasks", name, "--include_path", ".", "--model_args"]
    command += [f"model={model},base_url={base_url}/v1/chat/completions"]
    # docs: end
    return _results(command, name)


def _write_task(name: str, kind: str, rows: list[dict]) -> None:
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(f"{name}.yaml").write_text(COMMON.replace("NAME", name) + kind)


def _results(command: list[str], name: str) -> dict:
    command = [*command, "--output_path", "out"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    check(done.returncode == 0, (done.stdout + done.stderr)[-1500:])
    (found,) = Path("out").rglob("results*.json")
    return json.loads(found.read_text())["results"][name]


def likelihood(base_url: str, model: str) -> str:
    results = _evaluate(base_url, model, "own_likelihood", LIKELIHOOD)
    check(results["acc,none"] == 1, results)
    return f"acc {results['acc,none']}"


def generation(base_url: str, model: str) -> str:
    results = _evaluate(base_url, model, "own_generation", GENERATION)
    check("exact_match,none" in results, results)
    return f"exact_match {results['exact_match,none']}"


def chat(base_url: str, model: str) -> str:
    results = _evaluate_chat(base_url, model, "own_chat", CHAT)
    check(results["exact_match,none"] == 1, results)  # the answer to "Hello" is "Hello! ..."
    return f"exact_match {results['exact_match,none']}"


if __name__ == "__main__":
    run(likelihood, generation, chat)
