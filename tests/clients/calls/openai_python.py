"""OpenAI's Python SDK: what came of each call, as JSON."""

import json
import os
import time

import openai

client = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["KEY"], max_retries=1)
messages = [{"role": "user", "content": "Is it windy in Oslo?"}]
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
function = {"name": "weather", "parameters": schema}
said: dict = {"models": [model.id for model in client.models.list()]}
answer = client.chat.completions.create(model="m", messages=messages, max_tokens=8, temperature=0)
said["chat"] = answer.choices[0].message.content
with client.chat.completions.create(
    model="m",
    messages=messages,
    max_tokens=8,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
) as stream:
    chunks = list(stream)
said["stream"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
said["usage"] = chunks[-1].usage.completion_tokens
called = client.chat.completions.create(
    model="m",
    messages=messages,
    tools=[{"type": "function", "function": function}],
    tool_choice="required",
    temperature=0,
)
call = called.choices[0].message.tool_calls[0].function
said["tool"], said["arguments"] = call.name, call.arguments
response = client.responses.create(model="m", input="Is it windy?", max_output_tokens=8, temperature=0)
said["response"] = response.output_text
with client.responses.stream(model="m", input="Is it windy?", max_output_tokens=8, temperature=0) as events:
    said["events"] = list(dict.fromkeys(event.type for event in events))  # as many of a kind as there were pieces
texts = ["the watch begins", "the sun", "the watch begins"]
embedder = client.with_options(base_url=os.environ["EMBEDDINGS_URL"])
vectors = [one.embedding for one in embedder.embeddings.create(model="e", input=texts).data]
said["embeddings"] = [len(vectors), len(vectors[0]), vectors[0] == vectors[2], vectors[0] == vectors[1]]
url = "/v1/chat/completions"
body = {"model": "m", "messages": messages, "max_tokens": 4}
lines = [json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) for name in "abc"]


def start():
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")


def ended(batch):
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


if os.environ["BATCHES"]:
    batch = ended(start())
    answered = sorted(
        json.loads(line)["custom_id"] for line in client.files.content(batch.output_file_id).text.splitlines()
    )
    said["batch"] = {"status": batch.status, "counts": batch.request_counts.model_dump(), "answered": answered}
    said["cancelled"] = ended(client.batches.cancel(start().id)).status
    said["listed"] = [len(client.batches.list().data), len(client.files.list(purpose="batch").data)]
    said["deleted"] = client.files.delete(batch.output_file_id).deleted
said["errors"] = {}
for name, call in {
    "model": lambda: client.chat.completions.create(model="none", messages=messages),
    "value": lambda: client.chat.completions.create(model="m", messages=messages, n=0),
    "key": client.with_options(api_key="ph_wrong").models.list,
    "embeddings": lambda: client.embeddings.create(model="m", input="x"),
}.items():
    try:
        call()
    except openai.APIStatusError as error:
        said["errors"][name] = [type(error).__name__, error.status_code, error.code]
print(json.dumps(said))
