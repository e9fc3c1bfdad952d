"""Admin of the event record, and the base classes by which every other admin writes to it."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, cast

from django.contrib import admin
from django.db import transaction
from django.db.models import QuerySet
from django.forms import BaseModelFormSet, ModelForm
from django.http import HttpRequest, HttpResponse

from controlplane.accounts.admin_site import RoleAdmin, Row
from controlplane.accounts.requests import NotedRequest, user_of
from controlplane.events import since
from controlplane.events.audit import record_change, record_creation, record_deletion, snapshot
from controlplane.events.models import Event


class CheckedAdmin(RoleAdmin[Row]):
    """What another changed while the page was open is not overwritten unseen (`events.since`)."""

    change_form_template = "admin/checked_form.html"

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **more: Any
    ) -> HttpResponse:
        drawn_after = context["original"] and str(since.newest())
        return super().render_change_form(request, context | {"drawn_after": drawn_after}, *args, **more)

    def checked_fields(self, row: Row, form: ModelForm[Row]) -> Collection[str]:
        """Return the names that events have for what *form* sets."""
        return form.fields

    def get_form(self, request: HttpRequest, obj: Row | None = None, change: bool = False, **more: Any) -> Any:
        form: Any = super().get_form(request, obj, change=change, **more)
        checked_fields = self.checked_fields
        if obj is None or request.method != "POST":
            return form

        def clean(self: Any) -> Any:
            values = form.clean(self)
            type(obj)._default_manager.select_for_update(of=("self",)).filter(pk=obj.pk).first()
            since.check(request.POST.get(since.FIELD, ""), obj, fields=checked_fields(obj, self))
            return values

        return type(form)(form.__name__, (form,), {"clean": clean})

    def get_formsets_with_inlines(self, request: HttpRequest, obj: Row | None = None) -> Iterator[tuple[Any, Any]]:
        for formset, inline in super().get_formsets_with_inlines(request, obj):
            if obj is None or request.method != "POST":
                yield formset, inline
            else:
                yield _checked(formset, request.POST.get(since.FIELD, "")), inline


def _checked(formset: type[BaseModelFormSet[Any, Any]], carried: str) -> type[BaseModelFormSet[Any, Any]]:
    """Return *formset* that refuses rows which another changed after *carried*."""

    def clean(self: BaseModelFormSet[Any, Any]) -> None:
        formset.clean(self)
        written = {
            form.instance.pk: form for form in self.initial_forms if form.has_changed() or form in self.deleted_forms
        }
        for row in self.get_queryset().select_for_update(of=("self",)).filter(pk__in=written):
            since.check(carried, row, fields=written[row.pk].fields)

    return type(formset.__name__, (formset,), {"clean": clean})


class AuditedAdmin(CheckedAdmin[Row]):
    """Every row created, changed or deleted here is an event with before and after.

    Changes are compared after many-to-many fields are saved too; rows edited inline have their own events.
    """

    def after_write(self, request: HttpRequest, row: Row, *, created: bool) -> None:
        """Hook for further work after a write, inside its transaction."""

    def save_model(self, request: HttpRequest, obj: Row, form: ModelForm[Row], change: bool) -> None:
        if change:
            cast(NotedRequest, request).audit_before = snapshot(type(obj)._default_manager.get(pk=obj.pk))
        super().save_model(request, obj, form, change)

    def save_related(
        self, request: HttpRequest, form: ModelForm[Row], formsets: list[BaseModelFormSet[Any, Any]], change: bool
    ) -> None:
        super().save_related(request, form, formsets, change)
        row = type(form.instance)._default_manager.get(pk=form.instance.pk)
        if change:
            record_change(row, cast(NotedRequest, request).audit_before, user_of(request))
        else:
            record_creation(row, user_of(request))
        self.after_write(request, row, created=not change)

    def save_formset(
        self, request: HttpRequest, form: ModelForm[Row], formset: BaseModelFormSet[Any, Any], change: bool
    ) -> None:
        kept = [child.instance for child in formset.initial_forms if child.instance.pk]
        assert formset.model is not None
        rows = formset.model._default_manager.in_bulk([row.pk for row in kept])
        before = {pk: snapshot(row) for pk, row in rows.items()}
        for child in formset.deleted_forms:
            if child.instance.pk in rows:
                record_deletion(rows[child.instance.pk], user_of(request))
        super().save_formset(request, form, formset, change)
        for row in formset.new_objects:
            record_creation(row, user_of(request))
        for row, _ in formset.changed_objects:
            record_change(row, before[row.pk], user_of(request))

    def delete_model(self, request: HttpRequest, obj: Row) -> None:
        record_deletion(obj, user_of(request))
        super().delete_model(request, obj)
        self.after_write(request, obj, created=False)

    @transaction.atomic
    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Row]) -> None:
        for row in queryset:
            record_deletion(row, user_of(request))
        super().delete_queryset(request, queryset)
        if queryset.model is not None:
            self.after_write(request, queryset.model(), created=False)


class ReadOnlyAdmin(RoleAdmin[Row]):
    """Rows that only Pilothouse itself writes."""

    show_full_result_count = False  # these tables grow without end: no second count of all rows on every page
    actions: Sequence[str | Callable[..., Any]] | None = None

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Row | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Row | None = None) -> bool:
        return False


class KindFilter(admin.SimpleListFilter):
    """Filter by families of kinds (`instance.`), which stay few."""

    title = parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        kinds = Event.objects.order_by("kind").values_list("kind", flat=True).distinct()
        families = sorted({kind.partition(".")[0] for kind in kinds})
        return [(family, family.replace("_", " ").capitalize()) for family in families]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Event]) -> QuerySet[Event]:
        return queryset.filter(kind__startswith=f"{self.value()}.") if self.value() else queryset


@admin.register(Event)
class EventAdmin(ReadOnlyAdmin[Event]):
    list_display = ["at", "severity", "kind", "subject", "actor", "short_reason"]
    list_filter = ["severity", KindFilter, "at"]
    search_fields = ["subject", "reason", "actor", "kind"]
    search_help_text = "Subject, reason, actor or kind"
    fieldsets = [
        (None, {"fields": ["at", "kind", "severity", "actor", "reason"]}),
        ("Subject", {"fields": ["subject_type", "subject_id", "subject"]}),
        ("What changed", {"fields": ["before", "after", "inputs"]}),
    ]

    @admin.display(description="reason")
    def short_reason(self, event: Event) -> str:
        return event.reason if len(event.reason) <= 80 else event.reason[:79] + "…"
