"""The form of a capacity plan: its fields are those of a question, and errors stand at them."""

from collections.abc import Iterator
from typing import Any, Final

from django import forms
from django.forms import BoundField

from controlplane.fleet.models import Device, GpuType, SloClass, SloKind
from controlplane.planning.sizing.question import ASSUMED_RESERVED, ASSUMED_SPOT
from controlplane.planning.sizing.selectors import gpu_types
from scheduling.fleet.profile_estimate import GPUS

GROWTH: Final = [("percent", "Percent a month"), ("curve", "A curve"), ("forecast", "The forecast")]
TARGETS: Final = {"ttft_ms": "TTFT (ms)", "itl_ms": "ITL (ms)", "e2e_ms": "E2E (ms)", "percentile": "Attainment (%)"}
CHOSEN: Final = "chosen"
"""Ending of the checkbox of an SLO class or GPU type."""


class CapacityForm(forms.Form):
    growth = forms.ChoiceField(choices=GROWTH, initial="percent", label="Demand grows by")
    percent = forms.FloatField(initial=10.0, required=False, label="Percent a month")
    months = forms.IntegerField(initial=6, required=False, label="For months")
    curve = forms.CharField(
        required=False, widget=forms.Textarea({"rows": 3, "placeholder": "1, 1.1\n2, 1.3"}), label="Curve",
        help_text="A line a month: month, demand as a multiple of today's.",
    )  # fmt: skip
    curve_file = forms.FileField(
        required=False, label="or a CSV file", widget=forms.FileInput({"accept": ".csv,text/csv"})
    )
    survives_loss = forms.BooleanField(required=False, label="Survive the loss of any one region (N-1)")
    reserved = forms.FloatField(
        initial=100 * ASSUMED_RESERVED, label="Reserved (% of on demand)", help_text="Assumed; enter your contract's."
    )
    spot = forms.FloatField(
        initial=100 * ASSUMED_SPOT, label="Spot (% of on demand)", help_text="Assumed where no spot price is kept."
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.label_suffix = ""
        self.slo_classes = [row for row in SloClass.objects.all() if row.promises]
        for row in self.slo_classes:
            usual = row.kind != SloKind.OPPORTUNISTIC
            self.fields[f"promises.{row.name}.{CHOSEN}"] = forms.BooleanField(
                required=False, initial=usual, label=row.title
            )
            held = {"ttft_ms": row.ttft_target_ms, "itl_ms": row.itl_target_ms, "e2e_ms": row.e2e_target_ms,
                    "percentile": row.percentile}  # fmt: skip
            for name, label in TARGETS.items():
                self.fields[f"promises.{row.name}.{name}"] = forms.FloatField(
                    required=False, initial=held[name], label=f"{label} of {row.title}"
                )
        rows = {row.name: row for row in GpuType.objects.filter(device=Device.GPU)}
        used = gpu_types({}) if rows else {}
        self.gpus = {
            name: rows[name].title if name in rows else GPUS[name].title for name in dict.fromkeys([*rows, *GPUS])
        }
        for name, title in self.gpus.items():
            usd = float(rows[name].on_demand_usd_per_hour) if name in rows else None
            self.fields[f"gpus.{name}.{CHOSEN}"] = forms.BooleanField(required=False, initial=name in used, label=title)
            self.fields[f"gpus.{name}"] = forms.FloatField(required=False, initial=usd, label=f"{title}, $ an hour")

    def of_growth(self) -> list[BoundField]:
        return [self[name] for name in ("growth", "percent", "months", "curve", "curve_file")]

    def of_prices(self) -> list[BoundField]:
        return [self["reserved"], self["spot"]]

    def promises(self) -> Iterator[tuple[BoundField, list[BoundField]]]:
        for row in self.slo_classes:
            own = f"promises.{row.name}."
            yield self[f"{own}{CHOSEN}"], [self[f"{own}{name}"] for name in TARGETS]

    def prices(self) -> Iterator[tuple[BoundField, BoundField]]:
        return ((self[f"gpus.{name}.{CHOSEN}"], self[f"gpus.{name}"]) for name in self.gpus)

    def question(self) -> dict[str, Any]:
        """Return the question of the valid form, as `services.read` takes it."""
        given = self.cleaned_data
        file = given["curve_file"]
        promises = {
            row.name: {name: given[f"promises.{row.name}.{name}"] for name in TARGETS}
            for row in self.slo_classes
            if given[f"promises.{row.name}.{CHOSEN}"]
        }
        gpus = {name: given[f"gpus.{name}"] for name in self.gpus if given[f"gpus.{name}.{CHOSEN}"]}
        return {
            **{name: given[name] for name in ("growth", "percent", "months") if given[name] is not None},
            "curve": file.read(100_000).decode("utf-8", "replace") if file else given["curve"],
            "promises": promises,
            "gpus": gpus,
            "survives_loss": given["survives_loss"],
            "reserved": given["reserved"] / 100,
            "spot": given["spot"] / 100,
        }

    def refuse(self, fields: dict[str, str]) -> None:
        """Show each sentence at its field."""
        for name, text in fields.items():
            self.add_error(name if name in self.fields else None, text)

    @classmethod
    def of(cls, question: dict[str, Any]) -> "CapacityForm":
        """Return the form as it was filled for *question*."""
        form = cls()
        given = question | {name: round(100 * question[name], 4) for name in ("reserved", "spot")}
        given["curve"] = "\n".join(f"{month}, {factor:g}" for month, factor in enumerate(question["curve"], 1))
        for name, promise in question["promises"].items():
            given |= {f"promises.{name}.{each}": value for each, value in promise.items() if value is not None}
        given |= {f"gpus.{name}": usd for name, usd in question["gpus"].items() if usd is not None}
        for kind, names in (("promises", question["promises"]), ("gpus", question["gpus"])):
            of = {name: name.split(".", 1)[1].removesuffix(f".{CHOSEN}") in names for name in form.fields
                  if name.startswith(f"{kind}.") and name.endswith(f".{CHOSEN}")}  # fmt: skip
            given |= of if names else {}
        form.initial = {name: value for name, value in given.items() if name in form.fields}
        return form
