"""A server's life: render its template, start it, wait until the model answers, take it down."""

from harness.serve.daemon import engine_version as engine_version
from harness.serve.document import compose_document as compose_document
from harness.serve.document import server_problems_of as server_problems_of
from harness.serve.endpoint import Endpoint as Endpoint
from harness.serve.offline import is_offline as is_offline
from harness.serve.serve import attach as attach
from harness.serve.serve import serve as serve
from harness.serve.sweep import sweep as sweep
from harness.serve.sweep import sweep_all as sweep_all
from harness.serve.template import templates as templates
from harness.serve.template import variables as variables
