"""A server's life: render its template, start it, wait until the model answers, take it down."""

from harness.serve.document import compose_document as compose_document
from harness.serve.document import server_document as server_document
from harness.serve.document import upstream_of as upstream_of
from harness.serve.engine import connect as connect
from harness.serve.engine import engine_version as engine_version
from harness.serve.engine import sweep as sweep
from harness.serve.lifecycle import Endpoint as Endpoint
from harness.serve.lifecycle import attach as attach
from harness.serve.lifecycle import serve as serve
from harness.serve.lint import server_problems_of as server_problems_of
from harness.serve.template import PreparedServer as PreparedServer
from harness.serve.template import prepared as prepared
from harness.serve.template import templates as templates
from harness.serve.template import variables as variables
