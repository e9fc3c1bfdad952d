"""The web process with predicted lengths that are wrong by a lognormal factor (log sd 0.6), for a benchmark on a server
whose answers have a given length: `uvicorn tests.bench._noisy_lengths:application`.

A prediction of our length models has about that error. Without this, a request with `ignore_eos` is predicted exactly.
"""

import random

from controlplane.asgi import application
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.lengths.length_service import LengthService

LOG_SD = 0.6
_predict = LengthService.predict
_random = random.Random(0)


async def predict(self, query, read, characters):
    prediction = await _predict(self, query, read, characters)
    prediction.tokens = max(1, round(prediction.tokens * _random.lognormvariate(0.0, LOG_SD)))
    return prediction


LengthService.predict = predict
# An answer of a given length has its length as the limit too, which would correct every prediction that is too long.
Dispatcher.possible = lambda self, asked: int(max(1, asked.predicted_tokens))

__all__ = ["application"]
