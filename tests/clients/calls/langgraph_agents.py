"""Agents of LangGraph, by LangChain's `create_agent`: one that nothing marks, and two whose calls are of one marked run."""

import json
import os

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"Windy in {city}."


given = {"base_url": os.environ["BASE_URL"], "api_key": os.environ["KEY"], "max_retries": 0}
said: dict = {}


def messages_of(model: ChatOpenAI, prompt: str, asked: str) -> list[str]:
    agent = create_agent(model, [weather], system_prompt=prompt)
    answer = agent.invoke({"messages": [("human", asked)]}, {"recursion_limit": 12})
    first = answer["messages"]
    again = agent.invoke({"messages": [*first, ("human", "And tomorrow?")]}, {"recursion_limit": 12})
    return [message.type for message in again["messages"]]


said["unmarked"] = messages_of(ChatOpenAI(model="m", max_tokens=16, **given), "You tell the weather.", "Is it windy?")
for unit in ("plan", "write"):
    metadata = {"application": "report", "run": "run-1", "unit": unit, "run_deadline_s": "120"}
    marked = ChatOpenAI(model="m", max_tokens=16, extra_body={"metadata": metadata}, **given)
    said[unit] = messages_of(marked, f"You {unit}.", "A report on wind.")
print(json.dumps(said))
