"""From its options to a coordinator; imported in a coordinator's own process, and without torch."""

from zrt.actors.coordinator.coordinator import Coordinator
from zrt.actors.coordinator.sessions.requests import Requests
from zrt.actors.options import CoordinatorOptions
from zrt.runtime.models.architecture.spec import read_spec
from zrt.runtime.models.fetch.resolve import resolve


def make(options: CoordinatorOptions) -> Coordinator:
    """Return the coordinator of a cluster file, whose model must have been fetched. ZrtError
    bad_config, bad_model."""
    conf = options.read()
    folder = resolve(conf.model.ref, weights=conf.model.weights == "files")
    spec = read_spec(folder)
    prompts = Requests(folder, spec, min(conf.model.context, spec.max_positions))
    return Coordinator(conf, folder, spec, prompts, cluster=options.cluster_id, port_s=options.port_wait)
