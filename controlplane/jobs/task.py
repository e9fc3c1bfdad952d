"""The base of every Celery task: what beat started is noted as a run of its job."""

from typing import TYPE_CHECKING, Any

from celery import Task, signals

if TYPE_CHECKING:
    BaseTask = Task[..., Any]
else:
    BaseTask = Task


class JobFailed(Exception):
    """A periodic job failed; what and where is noted and logged already."""


class RecordedTask(BaseTask):
    """Notes success, failure and duration when a worker runs a periodic task; a direct call is only a call."""

    abstract = True
    throws = (JobFailed,)  # logged in one line, without the traceback that was logged at the first failure

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from controlplane.jobs.schedule import does_itself, jobs_of
        from controlplane.jobs.services import note_failure, recorded

        names = () if self.request.called_directly else jobs_of(self.name)
        if not names:
            return super().__call__(*args, **kwargs)
        try:
            if does_itself(self.name):
                with recorded(*names):
                    return super().__call__(*args, **kwargs)
            return super().__call__(*args, **kwargs)
        except Exception as error:
            if not does_itself(self.name):
                for name in names:
                    note_failure(name, error)
            raise JobFailed(str(error)) from None


@signals.task_failure.connect
def note_lost(sender: Any = None, exception: BaseException | None = None, **_: Any) -> None:
    """A task that was killed (time limit, out of memory) cannot note that itself; the worker's main process does."""
    from controlplane.jobs.schedule import jobs_of
    from controlplane.jobs.services import note_failure

    if sender is not None and exception is not None and not isinstance(exception, JobFailed):
        for name in jobs_of(sender.name):
            note_failure(name, exception)
