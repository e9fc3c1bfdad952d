"""LiteLLM's SDK: what came of each call, as JSON."""

import json
import os

import litellm

litellm.suppress_debug_info = True
given = {
    "model": "openai/m",
    "api_base": os.environ["BASE_URL"],
    "api_key": os.environ["KEY"],
    "num_retries": 0,
    "temperature": 0,
}
messages = [{"role": "user", "content": "Is it windy in Oslo?"}]
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
said: dict = {"errors": {}}
said["chat"] = litellm.completion(messages=messages, max_tokens=8, **given).choices[0].message.content
stream = list(
    litellm.completion(messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}, **given)
)
said["stream"] = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
said["usage"] = stream[-1].usage.completion_tokens
called = litellm.completion(messages=messages, tools=tools, tool_choice="required", **given)
call = called.choices[0].message.tool_calls[0].function
said["tool"], said["arguments"] = call.name, call.arguments
for name, changes in {"model": {"model": "openai/none"}, "value": {"n": 0}, "key": {"api_key": "ph_wrong"}}.items():
    try:
        litellm.completion(messages=messages, **(given | changes))
    except Exception as error:
        said["errors"][name] = [type(error).__name__, error.status_code]
print(json.dumps(said))
