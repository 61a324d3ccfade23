"""lm-eval with local-completions: a likelihood task, and a task that generates text."""

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


def _evaluate(base_url: str, model: str, name: str, kind: str) -> dict:
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DATA))
    Path(f"{name}.yaml").write_text(COMMON.replace("NAME", name) + kind)
    # docs: lm-eval
    command = ["lm_eval", "run", "--model", "local-completions"]
    command += ["--tasks", name, "--include_path", ".", "--model_args"]
    address = f"base_url={base_url}/v1/completions"
    command += [f"model={model},{address},tokenizer={os.environ['TOKENIZER']}"]
    # docs: end
    command += ["--output_path", "out"]
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


if __name__ == "__main__":
    run(likelihood, generation)
