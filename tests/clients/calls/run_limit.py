"""OpenAI's or Anthropic's SDK, whichever is installed: the error of a call beyond the limit of its run, and the tries."""

import json
import os

marks = {"X-Application": "review", "X-Run": "one", "X-Run-Max-Tokens": "4"}
given = {
    "model": "m",
    "messages": [{"role": "user", "content": "Is it windy?"}],
    "max_tokens": 8,
    "extra_headers": marks,
}
try:
    import anthropic as sdk

    address = os.environ["BASE_URL"].removesuffix("/v1")
    call = sdk.Anthropic(base_url=address, api_key=os.environ["KEY"], max_retries=2).messages.create
except ImportError:
    import openai as sdk

    call = sdk.OpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["KEY"], max_retries=2).chat.completions.create
try:
    call(**given)
except sdk.APIStatusError as error:
    code = (error.body.get("error") or error.body)["code"]
    print(json.dumps([type(error).__name__, code, error.response.request.headers["x-stainless-retry-count"]]))
