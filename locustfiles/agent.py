"""An agent with tools: a model call, a tool that works for a while, the next model call with the tool's result.

Stock Locust:  locust -f locustfiles/agent.py --host http://127.0.0.1:8000 --steps 6 --sub-agents 2
"""

from functools import partial

from locust import task

from harness.load.openai_api import Tools, tool_call_message, tool_result_message
from harness.load.sequencer import Work
from harness.load.user import LLMUser
from harness.scenario.behaviour import Agent, chance, length_at, pause_s
from harness.workload import Message


class ToolAgent(LLMUser):
    """Works on tasks in steps; each step adds to the context. The plan sets the number of steps, not the answers.

    After an answer with a valid tool call the agent continues with that call, after any other with the plan's call: so
    every server gets the same load, whether its model can call tools or not.
    """

    endpoints = ("chat", "messages")
    uses = ("--steps", "--sub-agents")

    @task
    def work(self) -> None:
        agent = self.load.agent or Agent()
        works = self.take(agent.steps * (1 + agent.sub_agents))
        self.run_steps(agent, works[: agent.steps], works[agent.steps :])
        self.think()

    def run_steps(self, agent: Agent, works: list[Work], sub_agent_works: list[Work], batch: int | None = None) -> None:
        """Send the requests of one agent: a task, or several. After the first request, run its sub-agents."""
        tools = Tools.first(agent.tools, agent.choice)
        history: list[Message] = []
        new: list[Message] = []  # since the last answer: the task, or the tool's result
        task_index, step = 0, 0
        for work in works:
            if self.over():
                break
            if not new:
                task_index, step, history, new = work.index, 0, [], list(work.messages)
            step += 1
            request = work.with_messages(new) if step > 1 else work
            answer = self.ask(request, history, conversation=task_index, turn=step, batch=batch, tools=tools)
            parts = [sub_agent_works[i : i + agent.steps] for i in range(0, len(sub_agent_works), agent.steps)]
            self.at_once([partial(self.run_steps, agent, part, [], batch=task_index) for part in parts])
            sub_agent_works = []
            if chance(self.seed, "done", work.index) < agent.done:
                new = []
                continue
            self.pause(pause_s(agent.tool_time, self.seed, "tool", work.index))
            if answer.error is None:  # otherwise the next step repeats this one
                call = tools.first_valid(answer.calls) or tools.planned_call(work.index)
                history = [*history, *new, tool_call_message(answer.text, call)]
                tokens = length_at(agent.result_tokens, "result", self.seed, work.index)
                new = [tool_result_message(call, self.text(tokens, f"tool-{work.index}"))]
