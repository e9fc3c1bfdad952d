"""A what-if from an uploaded trace on two models: the form names what the trace lacks, and it runs to its end."""

import json

import pytest
from django.core.exceptions import ValidationError

from controlplane.console.pages.what_if.forms import begin_of
from controlplane.fleet.models import Deployment, PerformanceProfile
from controlplane.simulation.whatif import selectors, services
from controlplane.simulation.whatif.models import FutureSeed, WhatIf, WhatIfState
from controlplane.simulation.whatif.starts import traces
from controlplane.simulation.whatif.starts.begin import Begin
from controlplane.simulation.whatif.starts.begin import start_of as begun
from controlplane.simulation.whatif.timing import estimate
from tests.console.test_what_if_pages import NEW, entered
from tests.simulation.whatif import rows

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{at // 60:02}:{at % 60:02},{100 + at % 50},{10 + at % 20}\n" for at in range(0, 600, 2)
)
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
    f"{at},{'GPT-4' if at % 4 else 'ChatGPT'},{80 + at % 9},{20 + at % 7},100,API log\n" for at in range(0, 300, 2)
)
FORM = {"start": "trace", "horizon": "600", "seeds": "1", "chosen": "yes", "preset": "qlm"}
OTHER = "mistral-7b"


@pytest.fixture
def two_models(deployment, make_instance, language_model, profile, slo_class):
    """Two instances of each of two models in one region."""
    values = {"source": "mistralai/Mistral-7B", "weights_bytes": 15 * 2**30, "kv_bytes_per_token": 2**17}
    other = type(language_model).objects.create(name=OTHER, title="Mistral 7B", context_tokens=8192, **values)
    profile_of = {
        field.name: getattr(profile, field.name)
        for field in PerformanceProfile._meta.fields
        if field.name not in ("id", "model")
    }
    PerformanceProfile.objects.create(model=other, **profile_of)
    beside = Deployment.objects.create(
        model=other, region=deployment.region, gpu_type=deployment.gpu_type, tensor_parallel=2, max_instances=3
    )
    for number, place in enumerate((deployment, deployment, beside, beside)):
        make_instance(name=f"{place.model.name}-{number}", deployment=place)


@pytest.fixture
def trace(operator, two_models):
    """A trace that names no model."""
    return traces.upload("azure.csv", "azure", AZURE.encode(), operator)


def posted(client, user, trace, **fields):
    client.force_login(user)
    return client.post(NEW, FORM | {"trace": trace.pk} | {f"trace-{name}": text for name, text in fields.items()})


def ran(what_if):
    rows.run_all(what_if)
    assert not [run.error for run in FutureSeed.objects.all() if run.error]
    assert what_if.state == WhatIfState.DONE
    return selectors.comparison(what_if)["futures"]


@pytest.mark.django_db
def test_what_the_trace_does_not_say_is_asked(client, operator, trace):
    answer = posted(client, operator, trace)
    assert answer.status_code == 422
    what = (
        f"begin.trace_keys.model: is missing: a model, which the trace does not name, is none of llama-3.1-8b, {OTHER}"
    )
    assert what in answer.content.decode()
    assert not WhatIf.objects.exists()


@pytest.mark.django_db
def test_it_runs_to_its_end_from_the_page(client, operator, trace):
    answer = posted(client, operator, trace, model=OTHER, speed="2", slo_class="interactive")
    assert answer.status_code == 302, answer.content.decode()
    row = WhatIf.objects.get()
    said = {"model": OTHER, "speed": 2.0, "slo_class": "interactive"}
    assert row.start["arrivals"] == {"kind": "file", "trace": trace.pk, **said}
    assert "trace-model=mistral-7b" in row.asked
    first, second = ran(row)
    assert first["requests"]["mean"] == second["requests"]["mean"] == 300


@pytest.mark.django_db
def test_names_of_the_trace_are_given_those_of_the_fleet(client, operator, two_models):
    client.force_login(operator)
    assert "There is no such trace. Upload one." in client.post(NEW, FORM).content.decode()
    trace = traces.upload("burst.csv", "burstgpt", BURSTGPT.encode(), operator)

    def named(**models):
        begin = {"kind": "trace", "trace": trace.pk, "trace_keys": {"models": models}}
        return client.post(NEW, FORM | {"advanced": json.dumps({"begin": begin})})

    answer = named(**{"GPT-4": OTHER})
    assert "the trace&#x27;s model &#x27;ChatGPT&#x27; is none of" in answer.content.decode()
    answer = named(**{"GPT-4": OTHER, "ChatGPT": "llama-3.1-8b"})
    assert answer.status_code == 302, answer.content.decode()
    row = WhatIf.objects.get()
    assert row.start["arrivals"]["models"] == {"GPT-4": OTHER, "ChatGPT": "llama-3.1-8b"}
    assert ran(row)[0]["requests"]["mean"] == 150


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("keys", "field", "what"),
    [
        ({}, "model", "is missing"),
        ({"model": "gpt"}, "model", "no instance of the fleet serves gpt"),
        ({"model": OTHER, "speed": -1}, "speed", "should be greater than 0"),
        ({"model": OTHER, "speed": "fast"}, "speed", "valid number"),
        ({"model": OTHER, "region": "mars"}, "region", "mars"),
        ({"model": OTHER, "hope": 1}, "hope", "is no key; there is speed, limit"),
    ],
)
def test_a_service_names_the_key_that_is_wrong_before_any_run(operator, trace, keys, field, what):
    start = begun(Begin(kind="trace", trace=trace.pk, trace_keys=keys), 600.0)
    row = rows.draft(operator, start=start.model_dump(mode="json"), horizon_s=600.0)
    with pytest.raises(ValidationError) as error:
        services.submit(row, operator)
    messages = error.value.message_dict
    assert list(messages) == [f"begin.trace_keys.{field}"]
    assert what in messages[f"begin.trace_keys.{field}"][0]


@pytest.mark.django_db
def test_a_trace_that_is_gone_is_said_so(operator, trace):
    start = begun(Begin(kind="trace", trace=trace.pk, trace_keys={"model": OTHER}), 600.0)
    row = rows.draft(operator, start=start.model_dump(mode="json"), horizon_s=600.0)
    trace.delete()
    assert "upload it again" in services.check(row)["begin.trace_keys.trace"]


@pytest.mark.django_db
def test_the_estimate_follows_speed_and_limit(trace):
    def requests(**keys):
        return estimate(begun(Begin(kind="trace", trace=trace.pk, trace_keys=keys), 60.0), 60.0, 1, 1).requests

    assert requests() == 30
    assert requests(speed=2.0) == 60
    assert requests(limit=7) == 7
    assert begin_of(entered(start="trace"))["trace"] == str(trace.pk)
