"""Chat templates that write calls and thoughts as those of today's models do, told anew and short.

Each is the format of a family: what stands around a name, its arguments, several calls, a thought.
What a family's own template does besides (dates, system prompts, images) is left out.
"""

CALL = "{%% for c in m.tool_calls or [] %%}%s{%% endfor %%}"
NAME, JSON = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
TURNS = ("{%% if tools %%}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{%% endif %%}"
         "{%% for m in messages %%}<|im_start|>{{ m.role }}\n%s<|im_end|>\n{%% endfor %%}"
         "{%% if add_generation_prompt %%}<|im_start|>assistant\n%s{%% endif %%}")
THOUGHT = "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n" \
          "{% endif %}"
SPACE, BETWEEN = "{{ '\n' if m.content and m.tool_calls }}", "{{ '\n' if not loop.first }}"
HERMES = SPACE + CALL % (
    BETWEEN + "<tool_call>\n"
    f'{{"name": "{NAME}", "arguments": {JSON}}}\n</tool_call>')
WRITTEN = "{{ v if v is string else v | tojson }}"
XML = SPACE + CALL % (
    BETWEEN + "<tool_call>\n<function=" + NAME + ">\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n" + WRITTEN +
    "\n</parameter>\n{% endfor %}</function>\n</tool_call>")
GLM = CALL % (
    "\n<tool_call>" + NAME + "\n{% for k, v in c.function.arguments | items %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>" + WRITTEN + "</arg_value>\n{% endfor %}</tool_call>")
PYTHON = (
          "{%% if m.tool_calls %%}<|tool_call_start|>[{%% for c in m.tool_calls %%}"
          "{{ c.function.name }}({%% for k, v in c.function.arguments | items %%}{{ k }}="
          "{%% if v is string %%}%s{%% elif v is mapping %%}{{ v | tojson }}{%% else %%}{{ v }}"
          "{%% endif %%}{{ ', ' if not loop.last }}{%% endfor %%})"
          "{{ ', ' if not loop.last }}{%% endfor %%}]<|tool_call_end|>{%% endif %%}")
ESCAPED = (r"""'{{ v | replace('\\', '\\\\') | replace("'", "\\'") | replace('\n', '\\n') }}'""")
GEMMA = (
    "{%- macro written(v) -%}{%- if v is string -%}<|\"|>{{ v }}<|\"|>"
    "{%- elif v is mapping -%}"
    "{{ '{' }}{%- for k, one in v | dictsort -%}{{ k }}:{{ written(one) }}"
    "{{ ',' if not loop.last }}"
    "{%- endfor -%}}{%- elif v is sequence -%}[{%- for one in v -%}{{ written(one) }}"
    "{{ ',' if not loop.last }}{%- endfor -%}]{%- else -%}{{ v | tojson }}{%- endif -%}"
    "{%- endmacro -%}"
    "{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content }}\n<channel|>"
    "{% endif %}{{ m.content }}" + CALL % (
        "<|tool_call>call:" + NAME + "{{ written(c.function.arguments) }}<tool_call|>") +
    "<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}")
CHANNELS = (
    "{% for m in messages %}{% if m.role != 'assistant' %}<|start|>{{ m.role }}<|message|>"
    "{{ m.content }}<|end|>{% else %}{% if m.reasoning_content %}<|start|>assistant<|channel|>"
    "analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}{% if m.tool_calls %}"
    "{% set c = m.tool_calls[0] %}<|start|>assistant to=functions." + NAME +
    "<|channel|>commentary json<|message|>" + JSON + "<|call|>{% else %}<|start|>assistant"
    "<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}")
RECIPIENTS = (
    "{% for m in messages %}{% if m.role != 'assistant' %}<|start|>{{ m.role }}<|message|>"
    "{{ m.content }}<|eot|>{% else %}<|start|>assistant{% if m.reasoning_content %} to=self<|"
    "message|>{{ m.reasoning_content }}<|eom|><|start|>assistant{% endif %}{% if m.tool_calls %}"
    + CALL % (
        "{% if not loop.first %}<|eom|><|start|>assistant{% endif %} to=" + NAME + "<|message|>"
        '<calls>\n<invoke name="' + NAME + '">\n{% for k, v in c.function.arguments | items %}'
        '<parameter name="{{ k }}">' + WRITTEN + "</parameter>\n{% endfor %}</invoke>\n</calls>") +
    "{% else %} to=user<|message|>{{ m.content }}{% endif %}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}")
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>"
    "{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>" + CALL % (
        BETWEEN + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + NAME +
        "\n```json\n{{ c.function.arguments + '\n' }}```<｜tool▁call▁end｜>") +
    "<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% else %}<｜User｜>{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}")
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}" + CALL % (
        "[TOOL_CALLS]" + NAME + "[ARGS]" + JSON) + "</s>{% else %}[INST]{{ m.content }}[/INST]"
    "{% endif %}{% endfor %}")
WITH_IDS = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% if m.tool_calls %}"
    "[TOOL_CALLS][" + CALL % (
        "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
        '{"name": "' + NAME + '", "arguments": ' + JSON + ', "id": "{{ c.id }}"}'
        "{{ ', ' if not loop.last }}") + "]{% endif %}</s>{% else %}[INST]{{ m.content }}[/INST]"
    "{% endif %}{% endfor %}")
CALL_IDS = MISTRAL.replace("[ARGS]", "[CALL_ID]{{ c.id }}[ARGS]")
SOLAR = (
    "{% for m in messages %}<|begin|>{{ m.role }}<|content|>{{ m.content }}{% if m.tool_calls %}"
    "<|tool_calls|>" + CALL % (
        "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>" + NAME + "<|tool_call:args|>" + JSON +
        "<|tool_call:end|>") + "<|calls|>{% else %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant<|content|>{% endif %}")
LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}"
    '{% endif %}{% set c = m.tool_calls[0] %}{"name": "' + NAME + '", "parameters": ' + JSON + "}"
    "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")

XLAM = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}{% if m.tool_calls %}[" + CALL % (
        '{"name": "' + NAME + '", "arguments": ' + JSON + "}{{ ', ' if not loop.last }}") +
    "]{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")
HUNYUAN = (
    "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.content }}<|eot|>"
    "{% else %}{{ '助手：' + m.content if not m.tool_calls }}{% if m.tool_calls %}<tool_calls>[" +
    CALL % ('{"name": "' + NAME + '", "arguments": ' + JSON + "}{{ ', ' if not loop.last }}") +
    "]</tool_calls>{% endif %}<|im_end|>{% endif %}{% endfor %}")
COMMAND = (
    "{% for m in messages %}<|turn>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}<|START_THINKING|><|END_THINKING|><|START_ACTION|>[" + CALL % (
        '{"tool_name": "' + NAME + '", "parameters": ' + JSON + "}{{ ', ' if not loop.last }}") +
    "]<|END_ACTION|>{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
    "{% else %}{{ m.content }}{% endif %}<turn|>{% endfor %}{% if add_generation_prompt %}"
    "<|turn>assistant\n<|START_THINKING|><|END_THINKING|>{% endif %}")
NEMOTRON_2 = (
    "{% for m in messages %}<|turn>{{ m.role }}\n{% if m.role == 'assistant' and not "
    "m.tool_calls %}<think>\n{% endif %}{{ m.content }}{% if m.tool_calls %}<TOOLCALL>[" + CALL % (
        '{"name": "' + NAME + '", "arguments": ' + JSON + "}{{ ', ' if not loop.last }}") +
    "]</TOOLCALL>{% endif %}<turn|>{% endfor %}{% if add_generation_prompt %}"
    "<|turn>assistant\n<think>\n{% endif %}")

SAID = "{{ m.content }}"
TEMPLATES = {
    "Qwen2.5": TURNS % (SAID + HERMES, ""),
    "Qwen3": TURNS % (THOUGHT + SAID + HERMES, ""),
    "Qwen3.5": TURNS % (THOUGHT + SAID + XML, "<think>\n"),
    "Qwen3.5 without a thought": TURNS % (THOUGHT + SAID + XML, "<think>\n\n</think>\n\n"),
    "Nemotron 3": TURNS % (
        "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}"
        + SAID + XML, "<think>\n"),
    "GLM-4-MoE": TURNS % (
        "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}"
        + SAID + GLM, ""),
    "LFM2.5": TURNS % (SAID + PYTHON % "'{{ v }}'", ""),
    "LFM2.5 VL": TURNS % (SAID + PYTHON % ESCAPED, ""),
    "Gemma 4": GEMMA,
    "gpt-oss": CHANNELS,
    "recipients": RECIPIENTS,
    "DeepSeek V3": DEEPSEEK,
    "Mistral": MISTRAL,
    "Mistral Nemo": WITH_IDS,
    "Mistral Small 3.2": CALL_IDS,
    "Solar": SOLAR,
    "Llama 3.1": LLAMA,
    "xLAM": XLAM,
    "Hunyuan A13B": HUNYUAN,
    "Command R7B": COMMAND,
}
ENDS = ("<|im_end|>", "<turn|>", "<|call|>", "<|return|>", "<|eot|>", "<｜end▁of▁sentence｜>",
        "</s>", "<|eot_id|>")  # the tokens that end a turn in one of them
