"""Agents of Pydantic AI, by chat and by Responses: what came of each run, as JSON."""

import asyncio
import json
import os

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Wind(BaseModel):
    city: str
    metres_per_s: int


def weather(city: str) -> str:
    """The weather in a city."""
    return f"Windy in {city}."


def provider(key: str = os.environ["KEY"]) -> OpenAIProvider:
    return OpenAIProvider(base_url=os.environ["BASE_URL"], api_key=key)


async def main() -> dict:
    asked, said = "Is it windy in Oslo?", {"errors": {}}
    for name, kind in (("chat", OpenAIChatModel), ("responses", OpenAIResponsesModel)):
        model = kind("m", provider=provider())
        agent = Agent(model, tools=[weather], model_settings={"temperature": 0.0, "max_tokens": 64})
        result = await agent.run(asked)
        parts = [part.part_kind for message in result.all_messages() for part in message.parts]
        async with Agent(model, model_settings={"temperature": 0.0, "max_tokens": 8}).run_stream(asked) as stream:
            streamed = "".join([piece async for piece in stream.stream_text(delta=True, debounce_by=None)])
        typed = await Agent(model, output_type=Wind, model_settings={"temperature": 0.0, "max_tokens": 64}).run(asked)
        said[name] = {"said": result.output, "parts": parts, "stream": streamed, "typed": typed.output.model_dump()}
    for name, model in {
        "model": OpenAIChatModel("none", provider=provider()),
        "key": OpenAIChatModel("m", provider=provider("ph_wrong")),
    }.items():
        try:
            await Agent(model).run(asked)
        except ModelHTTPError as error:
            said["errors"][name] = [type(error).__name__, error.status_code]
    return said


print(json.dumps(asyncio.run(main())))
