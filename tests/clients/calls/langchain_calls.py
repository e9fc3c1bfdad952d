"""LangChain's OpenAI integration, and an agent of it with a tool: what came of each call, as JSON."""

import json
import os

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"Windy in {city}."


known = {"api_key": os.environ["KEY"], "max_retries": 0}
given = known | {"base_url": os.environ["BASE_URL"], "temperature": 0}
model = ChatOpenAI(model="m", max_tokens=8, **given)
said: dict = {"errors": {}, "chat": model.invoke("Is it windy in Oslo?").content}
chunks = list(model.stream("Is it windy in Oslo?", stream_usage=True))
said["stream"] = "".join(chunk.content for chunk in chunks)
said["usage"] = sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)
able = ChatOpenAI(model="m", **given)
asked = able.bind_tools([weather], tool_choice="required").invoke("Is it windy in Oslo?")
said["tool"], said["arguments"] = asked.tool_calls[0]["name"], asked.tool_calls[0]["args"]
conversation = [("human", "Is it windy in Oslo?"), asked, weather.invoke(asked.tool_calls[0])]
after = able.invoke(conversation)
said["after"] = after.content or [call["args"] for call in after.tool_calls]
# Its own tokenizer would be asked for ids of OpenAI's models.
embedder = OpenAIEmbeddings(model="e", check_embedding_ctx_length=False, base_url=os.environ["EMBEDDINGS_URL"], **known)
vectors = embedder.embed_documents(["the watch begins", "the sun", "the watch begins"])
said["embeddings"] = [len(vectors), len(vectors[0]), vectors[0] == vectors[2], vectors[0] == vectors[1]]
for name, changes in {"model": {"model": "none"}, "key": {"api_key": "ph_wrong"}}.items():
    try:
        ChatOpenAI(**({"model": "m"} | given | changes)).invoke("x")
    except openai.APIStatusError as error:
        kind = next(of.__name__ for of in type(error).__mro__ if of.__module__.startswith("openai"))  # not its own
        said["errors"][name] = [kind, error.status_code]
print(json.dumps(said))
