"""A server's life: render its template, start it, wait until the model answers, take it down."""

from harness.serve.document import compose_document as compose_document
from harness.serve.document import find_upstream as find_upstream
from harness.serve.document import server_document as server_document
from harness.serve.engine import connect as connect
from harness.serve.engine import get_engine_version as get_engine_version
from harness.serve.engine import remove_leftovers as remove_leftovers
from harness.serve.lifecycle import Endpoint as Endpoint
from harness.serve.lifecycle import attach_to_server as attach_to_server
from harness.serve.lifecycle import serve as serve
from harness.serve.lint import find_server_problems as find_server_problems
from harness.serve.template import PreparedServer as PreparedServer
from harness.serve.template import prepare_server as prepare_server
from harness.serve.template import read_variables as read_variables
from harness.serve.template import templates as templates
