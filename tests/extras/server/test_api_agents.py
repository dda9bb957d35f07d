"""Agents' libraries against a real server: each by its own default way to tools and typed answers.

`pip install -e ".[test-full]"`; those of node (`npm install ai @ai-sdk/openai
@ai-sdk/openai-compatible zod @openai/codex`) are found where AGENTS_NODE_MODULES says.
"""

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, Field

NODE = os.environ.get("AGENTS_NODE_MODULES")
needs_node = pytest.mark.skipif(NODE is None, reason="AGENTS_NODE_MODULES names no folder")


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=8)
    days: int = Field(ge=0, le=9)


def forecast(city: Literal["Paris", "Rome"], days: Literal[1, 2]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def test_anthropics_client(server):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tools = [dict(name="weather", description="d", input_schema=Weather.model_json_schema())]
    asked = dict(model="tested", tools=tools, extra_body=dict(temperature=0))
    chat = [dict(role="user", content="The weather?")]
    one = dict(type="any", disable_parallel_tool_use=True)
    message = client.messages.create(max_tokens=120, tool_choice=one, messages=chat, **asked)
    [use] = message.content
    assert message.stop_reason == "tool_use" and Weather(**use.input)
    chat += [dict(role="assistant", content=message.content), dict(role="user", content=[
        dict(type="tool_result", tool_use_id=use.id, content="sunny")])]
    whole = client.messages.create(max_tokens=8, messages=chat, system="Be kind.", **asked)
    with client.messages.stream(max_tokens=8, messages=chat, system="Be kind.", **asked) as stream:
        text, final = "".join(stream.text_stream), stream.get_final_message()
    assert whole.content[0].text == final.content[0].text == text
    assert whole.usage.output_tokens == final.usage.output_tokens == 8
    with client.messages.stream(max_tokens=120, tool_choice=one, messages=chat, **asked) as stream:
        [use] = stream.get_final_message().content
    assert Weather(**use.input)
    assert client.messages.count_tokens(model="tested", messages=chat).input_tokens > 20
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="unknown", max_tokens=1, messages=chat)
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert caught.value.request_id


def test_openai_agents_by_responses_its_default(server):
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI
    model = agents.OpenAIResponsesModel("tested", AsyncOpenAI(base_url=f"{server.url}/v1",
                                                              api_key="none"))
    agents.set_tracing_disabled(True)
    agent = agents.Agent(
        "tester", instructions="Be kind.", model=model, tools=[agents.function_tool(forecast)],
        tool_use_behavior="stop_on_first_tool", model_settings=agents.ModelSettings(
            tool_choice="required", max_tokens=120, parallel_tool_calls=False, temperature=0))
    assert agents.Runner.run_sync(agent, "The weather?").final_output.startswith("sunny in")

    async def streamed() -> set[str]:
        run = agents.Runner.run_streamed(agent, "The weather?")
        return {event.type async for event in run.stream_events()}
    assert "run_item_stream_event" in asyncio.run(streamed())


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai_in_its_default_output_type(server, kind):
    ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider
    model = getattr(openai, kind)("tested", provider=OpenAIProvider(
        base_url=f"{server.url}/v1", api_key="none"))
    agent = ai.Agent(model, output_type=Weather,
                     model_settings=dict(max_tokens=150, temperature=0))
    assert isinstance(agent.run_sync("The weather?").output, Weather)

    async def streamed() -> Weather:
        async with agent.run_stream("The weather?") as run:
            return await run.get_output()
    assert isinstance(asyncio.run(streamed()), Weather)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(server, mode):
    instructor = pytest.importorskip("instructor")
    import openai
    client = instructor.from_openai(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none"),
                                    mode=instructor.Mode[mode])
    chat = [dict(role="user", content="The weather?")]
    made = client.chat.completions.create(model="tested", response_model=Weather, messages=chat,
                                          max_retries=1)
    assert isinstance(made, Weather)


@pytest.mark.parametrize("by_responses", [False, True])
def test_langchain(server, by_responses):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(model="tested", base_url=f"{server.url}/v1", api_key="none",
                                 temperature=0, max_tokens=120, use_responses_api=by_responses)
    bound = model.bind_tools([forecast], tool_choice="required")
    [call, *_] = bound.invoke("The weather?").tool_calls
    assert call["name"] == "forecast" and forecast(**call["args"])
    whole = None
    for piece in bound.stream("The weather?"):
        whole = piece if whole is None else whole + piece
    assert whole.tool_calls[0]["args"] == call["args"]
    for method in ("function_calling", "json_schema"):
        typed = model.with_structured_output(Weather, method=method)
        assert isinstance(typed.invoke("The weather?"), Weather)
    assert model.bind_tools([forecast]).invoke("The weather?").content


VERCEL = """
import { generateText, streamText, tool, Output } from 'ai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { createOpenAI } from '@ai-sdk/openai';
import { z } from 'zod';
const to = { baseURL: process.argv[2] + '/v1', apiKey: 'none' };
const city = z.enum(['Paris', 'Rome']);
const tools = { weather: tool({ inputSchema: z.object({ city }), execute: async (x) => x.city }) };
const told = [];
for (const make of [createOpenAICompatible({ name: 'n', supportsStructuredOutputs: true, ...to }),
                    createOpenAI(to)]) {
  const asked = { model: make('tested'), prompt: 'The weather?', maxOutputTokens: 120,
                  temperature: 0 };
  const one = await generateText({ ...asked, tools, toolChoice: 'required' });
  const stream = streamText({ ...asked, tools, toolChoice: 'required' });
  const calls = await stream.toolCalls;
  const form = await generateText({ ...asked, output: Output.object({
    schema: z.object({ city }) }) });
  told.push([one.toolResults[0].output, calls[0].input.city, form.output.city]);
}
console.log(JSON.stringify(told));
"""


@needs_node
def test_vercels_sdk_by_chats_and_by_responses(server):
    script = Path(NODE).parent / "agents_test.mjs"
    script.write_text(VERCEL)
    done = subprocess.run(["node", script.name, server.url], cwd=script.parent, text=True,
                          capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for cities in json.loads(done.stdout):
        assert set(cities) <= {"Paris", "Rome"} and len(cities) == 3


@needs_node
def test_codex_says_what_the_model_writes(tmp_path):
    """Its prompt has some 15,000 tokens, for which the bundled model is stretched."""
    from serving import Serving

    from nanoserve import LLM
    llm = LLM(dtype="float32", num_gpu_blocks_override=3000,
              hf_overrides={"max_position_embeddings": 40_000})
    llm.model_config.generation_defaults["max_new_tokens"] = 12
    with Serving(llm) as server:
        (tmp_path / "config.toml").write_text(
            'model = "tested"\nmodel_provider = "n"\n'
            '[model_providers.n]\nname = "n"\nwire_api = "responses"\nstream_max_retries = 0\n'
            f'base_url = "{server.url}/v1"\n')
        done = subprocess.run(
            [f"{NODE}/.bin/codex", "exec", "--skip-git-repo-check", "-s", "read-only", "Say hi."],
            cwd=tmp_path, env=os.environ | {"CODEX_HOME": str(tmp_path)}, text=True,
            capture_output=True, timeout=120, stdin=subprocess.DEVNULL)
    # The model doesn't end by itself, which Codex says once it has shown its words.
    assert "\ncodex\n" in done.stderr and "max_output_tokens" in done.stderr, done.stderr
