"""Agents of OpenAI's Agents SDK, by chat and by Responses: what came of each run, as JSON."""

import asyncio
import json
import os

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"Windy in {city}."


def agent(kind: type, model: str = "m", key: str = os.environ["KEY"]) -> Agent:
    client = openai.AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key=key, max_retries=0)
    settings = ModelSettings(temperature=0.0, max_tokens=64)
    instructions = "You tell the weather."
    asked = kind(model=model, openai_client=client)
    return Agent(name="weather", instructions=instructions, model=asked, tools=[weather], model_settings=settings)


async def main() -> dict:
    asked, said = "Is it windy in Oslo?", {"errors": {}}
    for name, kind in (("chat", OpenAIChatCompletionsModel), ("responses", OpenAIResponsesModel)):
        result = await Runner.run(agent(kind), asked)
        streamed = Runner.run_streamed(agent(kind), asked)
        kinds = [event.type async for event in streamed.stream_events()]
        said[name] = {
            "said": result.final_output,
            "items": [item.type for item in result.new_items],
            "streamed": streamed.final_output,
            "events": sorted(set(kinds)),
        }
    for name, wrong in {
        "model": agent(OpenAIChatCompletionsModel, model="none"),
        "key": agent(OpenAIResponsesModel, key="ph_wrong"),
    }.items():
        try:
            await Runner.run(wrong, asked)
        except openai.APIStatusError as error:
            said["errors"][name] = [type(error).__name__, error.status_code]
    return said


print(json.dumps(asyncio.run(main())))
