"""Instructor: typed answers by tools and by JSON schema, and partial ones from a stream, as JSON."""

import json
import os

import instructor
import openai
from pydantic import BaseModel


class Wind(BaseModel):
    city: str
    metres_per_s: int


given = {"model": "m", "messages": [{"role": "user", "content": "Is it windy in Oslo?"}], "temperature": 0}


def client(mode: instructor.Mode, key: str = os.environ["KEY"]) -> instructor.Instructor:
    sdk = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key=key, max_retries=0)
    return instructor.from_openai(sdk, mode=mode)


said: dict = {"errors": {}}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    answer = client(mode).chat.completions.create(response_model=Wind, max_retries=0, **given)
    said[mode.value] = answer.model_dump()
partial = list(client(instructor.Mode.TOOLS).chat.completions.create_partial(response_model=Wind, **given))
said["partial"] = partial[-1].model_dump()
for name, changes, key in (("model", {"model": "none"}, os.environ["KEY"]), ("key", {}, "ph_wrong")):
    try:
        client(instructor.Mode.TOOLS, key).chat.completions.create(
            response_model=Wind, max_retries=0, **(given | changes)
        )
    except Exception as error:
        status = error.__cause__ if not isinstance(error, openai.APIStatusError) else error
        while status is not None and not isinstance(status, openai.APIStatusError):
            status = status.__cause__
        said["errors"][name] = [type(status).__name__, status.status_code]
print(json.dumps(said))
