"""A server's life: render its template, start it, wait until the model answers, take it down."""

from harness.serve.compose.document import compose_document as compose_document
from harness.serve.compose.document import server_document as server_document
from harness.serve.compose.document import upstream_of as upstream_of
from harness.serve.compose.problems import server_problems_of as server_problems_of
from harness.serve.compose.template import templates as templates
from harness.serve.compose.template import variables as variables
from harness.serve.docker.daemon import connect as connect
from harness.serve.docker.daemon import engine_version as engine_version
from harness.serve.docker.sweep import sweep as sweep
from harness.serve.endpoint import Endpoint as Endpoint
from harness.serve.serve import attach as attach
from harness.serve.serve import serve as serve
from harness.serve.vllm.offline import is_offline as is_offline
