"""Anthropic's Python SDK: what came of each call, as JSON."""

import json
import os

import anthropic

address = os.environ["BASE_URL"].removesuffix("/v1")
client = anthropic.Anthropic(base_url=address, api_key=os.environ["KEY"], max_retries=1)
messages = [{"role": "user", "content": "Is it windy in Oslo?"}]
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"name": "weather", "input_schema": schema}]
given = {"model": "m", "messages": messages, "extra_body": {"temperature": 0}}
answer = client.messages.create(max_tokens=8, **given)
said: dict = {"message": answer.content[0].text, "type": answer.type, "stop_reason": answer.stop_reason}
with client.messages.stream(max_tokens=8, system="Be brief.", **given) as stream:
    said["stream"] = "".join(stream.text_stream)
    said["usage"] = stream.get_final_message().usage.output_tokens
called = client.messages.create(tools=tools, tool_choice={"type": "tool", "name": "weather"}, max_tokens=64, **given)
said["tool"], said["arguments"] = called.content[0].name, called.content[0].input
said["tokens"] = client.messages.count_tokens(model="m", messages=messages).input_tokens
by_token = anthropic.Anthropic(base_url=address, auth_token=os.environ["KEY"], api_key=None, max_retries=0)
said["by_token"] = by_token.messages.create(model="m", messages=messages, max_tokens=2).role
said["errors"] = {}
for name, call in {
    "model": lambda: client.messages.create(model="none", messages=messages, max_tokens=1),
    "value": lambda: client.messages.create(model="m", messages=messages, max_tokens=0),
    "key": lambda: client.with_options(api_key="wrong").messages.create(model="m", messages=messages, max_tokens=1),
}.items():
    try:
        call()
    except anthropic.APIStatusError as error:
        said["errors"][name] = [type(error).__name__, error.status_code, error.body["error"].get("code")]
print(json.dumps(said))
