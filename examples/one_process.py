"""Serve a model with prefill and decode in this process, and ask it: pip install openai."""

import openai

from dynamo_trtllm import serve

# The mock engine generates random tokens. With the torch extra, leave it out: the model answers.
with serve("tiny-gpt-oss", engine="mock") as deployment:
    client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=deployment.model,
        messages=[{"role": "user", "content": "Who are you?"}],
        max_tokens=100,
    )
    print(answer.choices[0].message.content, answer.usage)
