"""An agent with tools: a model call, a tool that works for a while, and again with what the tool returned.

Stock Locust:  locust -f locustfiles/agent.py --host http://127.0.0.1:8000 --steps 6 --sub-agents 2
"""

from functools import partial

from locust import task

from harness.load.openai_api import Tools, called, returned, valid_call
from harness.load.process import Work
from harness.load.user import LLMUser
from harness.scenario.behaviour import Agent, chance, pause_s
from harness.workload import Message


class ToolAgent(LLMUser):
    """Works on tasks in steps, with a context that grows. The plan says how many steps, not the model's answers.

    A step whose answer has a valid tool call goes on with that call, any other with the plan's: so every server gets
    the same load, whether its model can call tools or not.
    """

    endpoints = ("chat",)
    uses = ("--steps", "--sub-agents")

    @task
    def work(self) -> None:
        agent = self.load.agent or Agent()
        places = self.take(agent.steps * (1 + agent.sub_agents))
        self.steps(agent, places[: agent.steps], places[agent.steps :])
        self.think()

    def steps(self, agent: Agent, places: list[Work], of_others: list[Work], batch: int | None = None) -> None:
        """One agent's part, with a task or several. Its first step starts sub-agents, which have a part each."""
        tools = Tools.of(agent.tools, agent.choice)
        history: list[Message] = []
        new: list[Message] = []  # since the last answer: the task, or what the tool returned
        begin, step = 0, 0
        for place in places:
            if self.over():
                break
            if not new:
                begin, step, history, new = place.index, 0, [], list(place.messages)
            step += 1
            asked = place.saying(new) if step > 1 else place
            answer = self.ask(asked, history, conversation=begin, turn=step, batch=batch, tools=tools)
            parts = [of_others[first : first + agent.steps] for first in range(0, len(of_others), agent.steps)]
            self.at_once([partial(self.steps, agent, part, [], batch=begin) for part in parts])
            of_others = []
            if chance(self.seed, "done", place.index) < agent.done:
                new = []
                continue
            self.pause(pause_s(agent.tool_time, self.seed, "tool", place.index))
            if answer.error is None:  # otherwise the next step tries the same again
                call = valid_call(tools, answer.calls) or tools.planned(place.index)
                history = [*history, *new, called(answer.text, call)]
                new = [returned(call, self.text(agent.result_tokens, f"tool-{place.index}"))]
