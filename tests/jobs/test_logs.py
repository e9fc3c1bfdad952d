"""Services that do not answer are one line in the log; our own mistakes keep their traceback."""

import io
import logging

import pytest
import redis
from kombu.exceptions import OperationalError

from controlplane.logs import JsonFormatter, ServiceErrors


def written(error: Exception, formatter: logging.Formatter | None = None, name: str = "tests.logs") -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(ServiceErrors())
    handler.setFormatter(formatter)
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        raise error
    except Exception:
        logger.warning("consumer: connection to %s lost", "broker", exc_info=True)
    finally:
        logger.removeHandler(handler)
    return stream.getvalue()


@pytest.mark.parametrize("error", [redis.ConnectionError("refused"), OperationalError("refused"), OSError("refused")])
def test_a_service_that_does_not_answer_is_one_line(error):
    assert written(error) == f"consumer: connection to broker lost ({type(error).__name__}: refused)\n"
    assert "exception" not in written(error, JsonFormatter())


def test_what_follows_it_in_celery_itself_is_one_line_too():
    error = AttributeError("no hostname")
    error.__context__ = redis.ConnectionError("closed")
    assert written(error, name="celery.worker") == "consumer: connection to broker lost (AttributeError: no hostname)\n"
    assert "Traceback" in written(error, name="celery.app.trace")
    assert "Traceback" in written(AttributeError("no hostname"), name="celery.worker")


def test_a_mistake_keeps_its_traceback():
    text = written(IndexError("out of range"))
    assert "Traceback" in text
    assert text.endswith("IndexError: out of range\n")
