"""LlamaIndex's model of a server like OpenAI's: what came of each call, as JSON."""

import json
import os

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def weather(city: str) -> str:
    """The weather in a city."""
    return f"Windy in {city}."


def model(name: str = "m", max_tokens: int = 8, key: str = os.environ["KEY"]) -> OpenAILike:
    return OpenAILike(
        model=name,
        api_base=os.environ["BASE_URL"],
        api_key=key,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=4096,
        max_tokens=max_tokens,
        temperature=0.0,
        max_retries=0,
    )


asked = [ChatMessage(role="user", content="Is it windy in Oslo?")]
llm = model()
said: dict = {"errors": {}, "chat": llm.chat(asked).message.content, "complete": llm.complete("Is it windy?").text}
said["stream"] = "".join(chunk.delta or "" for chunk in llm.stream_chat(asked))
llm = model(max_tokens=64)
tool = FunctionTool.from_defaults(weather)
called = llm.chat_with_tools([tool], user_msg="Is it windy in Oslo?", tool_required=True)
(call,) = llm.get_tool_calls_from_response(called)
said["tool"], said["arguments"] = call.tool_name, call.tool_kwargs
for name, wrong in {"model": model("none"), "key": model(key="ph_wrong")}.items():
    try:
        wrong.chat(asked)
    except openai.APIStatusError as error:
        said["errors"][name] = [type(error).__name__, error.status_code]
print(json.dumps(said))
