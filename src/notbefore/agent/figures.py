"""``ProcessFigures``: the figures about the agent's own process that ``/metrics`` shows."""

import platform

from msgspec import structs

from notbefore import __version__
from notbefore.agent.runtime import Published, Runtime
from notbefore.agent.state import AgentState
from notbefore.agent.thread_guard import ThreadGuard
from notbefore.courier.supervisor import Supervisor
from notbefore.metrics.totals import ConfigFigures, Figures, increased
from notbefore.store.store import Store
from notbefore.web.access import Access


class ProcessFigures:
    """Reads the parts of the process, and counts what none of them counts: reloads and exports."""

    def __init__(
        self,
        *,
        runtime: Published[Runtime],
        state: AgentState,
        store: Store,
        supervisor: Supervisor,
        errors: ThreadGuard,
        access: Access,
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._store = store
        self._supervisor = supervisor
        self._errors = errors
        self._access = access
        self._config = ConfigFigures(loaded=state.clock.time())
        self.since = state.clock.now()  # when this process began to count
        self.exports: dict[tuple[str, str], int] = {}  # over OTLP, by signal and result

    @property
    def courier_trouble(self) -> str:
        """Why no courier works, so that notifications wait, in words; empty if one does."""
        return self._supervisor.trouble

    def count_reload(self) -> None:
        """Count a reload whose configuration is in use now."""
        reloads = increased(self._config.reloads, "success")
        self._config = ConfigFigures(loaded=self._state.clock.time(), reloads=reloads)

    def count_refused_reload(self) -> None:
        """Count a reload whose configuration was refused: the previous one stays in use."""
        reloads = increased(self._config.reloads, "failure")
        self._config = structs.replace(self._config, refused=True, reloads=reloads)

    def read(self) -> Figures:
        """Return the figures of this moment."""
        vm = self._state.snapshot.vm
        labels: dict[str, str] = {}
        if vm is not None:
            labels = structs.asdict(vm)
        return Figures(
            version=__version__,
            python=platform.python_version(),
            api_version=self._runtime.current.api_version,
            courier=self._supervisor.figures,
            config=self._config,
            store_degraded=self._store.disk.degraded is not None,
            store_damaged=self._store.disk.file.damaged,
            otlp_exports=self.exports.copy(),
            unforeseen=self._errors.count,
            restart_needed=self._supervisor.replaced and bool(self._supervisor.trouble),
            auth_failures=self._access.auth_failures,
            vm=labels,
            since=self.since,
        )
