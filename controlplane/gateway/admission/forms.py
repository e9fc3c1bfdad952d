"""Forms (`multipart/form-data`, RFC 7578) with a sound, as `/v1/audio` takes them: fields, and how long the sound is."""

from email.message import Message
from typing import Final, NamedTuple

from controlplane.gateway.errors import invalid
from workers.vllm.sound import seconds_of

MAX_FIELDS: Final = 100
MAX_FIELD_BYTES: Final = 2**16


class Form(NamedTuple):
    """A form: its *fields* but for `file`, and the seconds of sound in that."""

    fields: dict[str, str]
    seconds: float


def read_form(raw: bytes, content_type: bytes) -> Form:
    """Return the form in the body *raw*. Raises ApiError 400 naming what is wrong with it."""
    boundary = boundary_of(content_type)
    if not boundary:
        raise invalid("The request body must be a form (multipart/form-data) with a `file`.", "file", "invalid_type")
    parts = (b"\r\n" + raw).split(b"\r\n--" + boundary)[1:]
    if not parts or not parts[-1].startswith(b"--"):
        raise invalid("The form does not end with its boundary.", code="invalid_form")
    if len(parts) > MAX_FIELDS:
        raise invalid(f"The form has more than {MAX_FIELDS} fields.", code="invalid_form")
    fields: dict[str, str] = {}
    seconds: float | None = None
    for part in parts[:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        name = _name(head)
        if name == "file":
            seconds = seconds_of(content)
        elif len(content) > MAX_FIELD_BYTES:
            raise invalid(f"`{name}` is longer than {MAX_FIELD_BYTES} bytes.", name)
        else:
            fields[name] = content.decode(errors="replace")
    if seconds is None:
        raise invalid("`file` must be a sound.", "file", "missing_required_parameter")
    return Form(fields, seconds)


def with_field(raw: bytes, content_type: bytes, name: str, value: str) -> bytes:
    """Return the form *raw* with a field more, as the last: vLLM reads the last of a name."""
    boundary = boundary_of(content_type)
    end = raw.rfind(b"--" + boundary + b"--")
    field = b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (
        boundary,
        name.encode(),
        value.encode(),
    )
    return raw[:end] + field + raw[end:]


def boundary_of(content_type: bytes) -> bytes:
    """Return the boundary of a form; empty for any other content type."""
    header = Message()
    header["content-type"] = content_type.decode("latin-1")
    boundary = header.get_boundary("") if header.get_content_type() == "multipart/form-data" else ""
    return boundary.encode("latin-1", "replace")


def _name(head: bytes) -> str:
    for line in head.split(b"\r\n"):
        field, _, value = line.partition(b":")
        if field.strip().lower() == b"content-disposition":
            header = Message()
            header["content-disposition"] = value.strip().decode(errors="replace")
            name = header.get_param("name", None, "content-disposition")
            if isinstance(name, str) and name:
                return name
    raise invalid("A part of the form has no name.", code="invalid_form")
