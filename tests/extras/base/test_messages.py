"""Messages reach a chat template in the form that it expects.

Oracle: what transformers renders of the conversation when a caller who has read the template hands
it over in the right form. The templates are those of public models, shortened.
"""

from functools import partial

import pytest
from checkpoints import byte_tokenizer

from nanoserve_extras.base.messages import Taken
from nanoserve_extras.base.template_forms import render_messages

TOKENIZER = byte_tokenizer()
ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
TEMPLATES = {
    "chatml": ROLES,
    "llama 3.1": (  # asks whether the key is there; only one call at a time; trims
        "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls|length != 1 %}"
        "{{ raise_exception('one call') }}{% endif %}{% set c = m.tool_calls[0].function %}"
        '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
        "{% elif m.role == 'tool' %}<ipython>{{ m.content | tojson }}{% else %}<{{ m.role }}>"
        "{{ m.content | trim }}{% endif %}\n{% endfor %}"),
    "qwen coder": (  # iterates over the arguments
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string and m.content | trim | "
        "length > 0 %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}<function="
        "{{ c.function.name }}>{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}"
        "{% endfor %}{% endfor %}\n{% endfor %}"),
    "deepseek": (  # adds the arguments to a text
        "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}{% for c in "
        "m.tool_calls %}{{ c.function.name + '```json' + c.function.arguments + '```' }}"
        "{% endfor %}{% elif m.role == 'assistant' %}<assistant>{{ m.content.split('</think>')[-1] "
        "}}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}\n{% endfor %}"),
    "plain text": (  # prints the arguments as they come
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}({{ c.function.arguments }}){% endfor %}\n{% endfor %}"),
    "llama guard": (  # reads parts alone
        "{% for m in messages %}<{{ m.role }}>{% for p in m.content | selectattr('type', "
        "'equalto', 'text') %}{{ p.text | trim }}{% endfor %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}"),
    "old llama": (  # knows three roles
        "{% for m in messages %}{% if m.role == 'system' %}<<SYS>>{{ m.content }}{% elif m.role == "
        "'user' %}[INST]{{ m.content }}{% elif m.role == 'assistant' %}{{ m.content }}{% endif %}\n"
        "{% endfor %}"),
    "mistral": (  # refuses others
        "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
        "{{ raise_exception('only some roles') }}{% endif %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}\n{% endfor %}"),
}
RIGHT = {  # content, empty content, arguments; whether calls are written
    "llama 3.1": (str, "", dict), "qwen coder": (str, "", dict), "deepseek": (str, "", str),
    "plain text": (str, "", str), "llama guard": (list, [], dict), "mistral": (str, "", dict)}


THOUGHTS = "{% for m in messages %}<{{ m.reasoning_content }}>{{ m.content }}{% endfor %}"


def expected(name: str, messages: list[dict]) -> str:
    return TOKENIZER.apply_chat_template(messages, tokenize=False, chat_template=TEMPLATES[name])


def got(name: str, messages: list[dict]) -> str:
    return render_messages(messages, lambda given: expected(name, given))


def rendered(template: str, messages: list[dict], tools: list | None = None) -> str:
    return render_messages(messages, partial(TOKENIZER.apply_chat_template, tokenize=False,
                                             chat_template=template), tools)


def call(arguments) -> dict:
    return dict(id="call_1", type="function", function=dict(name="weather", arguments=arguments))


@pytest.mark.parametrize("content", [dict(content=None), dict(content=""), dict(content=[]), {}],
                         ids=str)
@pytest.mark.parametrize("arguments", ['{"city": "Café", "days": [1, 2]}',
                                       {"city": "Café", "days": [1, 2]}], ids=["text", "object"])
@pytest.mark.parametrize("name", RIGHT)
def test_calls_reach_the_template_whatever_the_client_sends(name, arguments, content):
    """OpenAI's wire has a call's arguments as a text of JSON: templates printed it with quotes
    around, or refused to iterate over it. A null was printed as "None"."""
    kind, empty, form = RIGHT[name]
    right = {str: '{"city": "Café", "days": [1, 2]}', dict: dict(city="Café", days=[1, 2])}[form]

    def text(content):
        return content if kind is str else [dict(type="text", text=content)]

    chat = [dict(role="user", content=text("How warm is it?")),
            dict(role="assistant", content=empty, tool_calls=[call(right)]),
            dict(role="tool", tool_call_id="call_1", content=text("12"))]
    sent = [dict(role="user", content="How warm is it?", name=None, audio=None),
            dict(role="assistant", refusal=None, tool_calls=[call(arguments)], **content),
            dict(role="tool", tool_call_id="call_1", content="12", tool_calls=[])]
    assert got(name, sent) == expected(name, chat)
    if not isinstance(arguments, dict):  # the older form
        sent[1] = dict(role="assistant", **content, function_call=dict(
            name="weather", arguments=arguments))
        assert got(name, sent) == expected(name, chat)


@pytest.mark.parametrize("nothing", [dict(tool_calls=[]), dict(tool_calls=None), {},
                                     dict(function_call=None, refusal=None, audio=None),
                                     dict(reasoning_content="", refusal="", name="")], ids=str)
@pytest.mark.parametrize("content", ["Hi! ", [dict(type="text", text="Hi! ")]], ids=str)
@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_comes_back_as_the_client_got_it(name, content, nothing):
    """`tool_calls: []` made templates that ask for the key refuse an ordinary chat."""
    parts = name == "llama guard"
    chat = [(role, [dict(type="text", text=text)] if parts else text) for role, text in (
        ("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi! "), ("user", "Why?"))]
    sent = [dict(role="system", content="Be brief."), dict(role="user", content="Hello"),
            dict(role="assistant", content=content, **nothing), dict(role="user", content="Why?")]
    assert got(name, sent) == expected(name, [
        dict(role=role, content=text) for role, text in chat])


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("looked_for", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_comes_back_by_either_name_and_reaches_each_template(name, looked_for):
    """vLLM's answers call it `reasoning`; templates read DeepSeek's `reasoning_content`, gpt-oss's
    its `thinking`, others `reasoning`."""
    template = THOUGHTS.replace("reasoning_content", looked_for)
    assert rendered(template, [dict(role="assistant", content="Hi!") | {name: "Hm."}]) == "<Hm.>Hi!"


@pytest.mark.parametrize(("name", "becomes"), [
    ("chatml", "developer"), ("old llama", "system"), ("mistral", "system")])
def test_a_developer_is_the_system_where_only_that_is_known(name, becomes):
    """OpenAI's newer name: templates that don't know it dropped its text in silence."""
    chat = [dict(role="developer", content="Be brief."), dict(role="user", content="Be brief.")]
    assert got(name, chat) == expected(name, [chat[0] | dict(role=becomes), chat[1]])


@pytest.mark.parametrize("role", ["tool", "critic"])
def test_no_message_is_dropped_without_a_word(role):
    """Also where the same words stand elsewhere in the prompt."""
    chat = [dict(role="user", content="Hello"), dict(role=role, content="Hello")]
    with pytest.raises(ValueError, match=f"does not write this message.*'role': '{role}'"):
        got("old llama", chat)


def test_a_model_without_tools_sees_no_call():
    chat = [dict(role="user", content="Hello"), dict(role="assistant", content="")]
    assert got("old llama", [chat[0], dict(role="assistant", tool_calls=[call({})])]) == got(
        "old llama", chat)


def test_texts_that_a_template_changes_are_not_missed():
    assert "<assistant>So." in got("deepseek", [
        dict(role="user", content="a"), dict(role="assistant", content="<think>Hm</think>So.")])
    thoughts = dict(role="assistant", content="<think>Hm</think>")
    assert "Hm" not in got("deepseek", [thoughts])
    assert '<ipython>"say \\"12\\""' in got("llama 3.1", [dict(role="tool", content='say "12"')])


@pytest.mark.parametrize(("message", "words"), [
    (dict(role="user", content=None), "messages.1: .*content"),
    (dict(role="user", content=5), "messages.1: .*content"),
    (dict(role="user", content=[dict(type="text", text="x" * 99), dict(type="image_url")]),
     r"^messages\.1\.content\.1: .*image_url"),
    (dict(role="user", content=[dict(type="text", text=5)]), "messages.1.content.0: "),
    (dict(role="user", content=[dict(type="document", source=dict(
        type="base64", media_type="application/pdf", data="x"))]),
     "messages.1.content.0: .*document"),
    (dict(role="", content="x"), "messages.1: .*role"),
    (dict(role=["user"], content="x"), "messages.1: .*role"),
    (dict(role="assistant", tool_calls=[dict(function={})]), "tool_calls"),
    (dict(role="assistant", tool_calls=5), "tool_calls"),
    (dict(role="assistant", function_call="f"), "tool_calls")], ids=str)
def test_what_is_no_message_is_refused_by_name(message, words):
    with pytest.raises(ValueError, match=words):
        got("qwen coder", [dict(role="user", content="a"), message])


def test_a_call_without_arguments_has_an_empty_object():
    for given in ("", "{}", {}, None):
        chat = [dict(role="user", content="a"), dict(role="assistant", tool_calls=[call(given)])]
        assert '"parameters": {}}' in got("llama 3.1", chat)
        assert "weather({})" in got("plain text", chat)


@pytest.mark.parametrize("given", ['{"city": ', "null", "[" * 10 ** 6, [1]],
                         ids=["cut", "null", "deep", "a list"])
def test_arguments_that_are_no_object_go_with_a_warning(given):
    """A limit had cut them, and each later turn of the agent was refused."""
    chat = [dict(role="user", content="a"), dict(role="assistant", tool_calls=[call(given)]),
            dict(role="tool", tool_call_id="call_1", content="not run")]
    right = [*chat[:1], chat[1] | dict(tool_calls=[call({})]), *chat[2:]]
    with pytest.warns(UserWarning, match="no JSON object: .* goes on without"):
        assert got("llama 3.1", chat) == got("llama 3.1", right)


RULES = {  # of real templates, in our words
    "one system, in front": (  # Qwen 3.5 to 3.8
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('not in front') }}{% endif %}{% if m.role not in ['system', 'user', "
        "'assistant', 'tool'] %}{{ raise_exception('unknown') }}{% endif %}<{{ m.role }}>"
        "{{ m.content }}\n{% endfor %}"),
    "the first system alone": (  # Qwen 3 VL drops the others
        "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}\n{% endif %}"
        "{% for m in messages if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}\n"
        "{% endfor %}"),
    "turns alternate": (  # Mistral, Gemma 3
        "{% for m in messages %}{% if m.role != 'system' and (m.role == 'user') != (loop.index0 % "
        "2 == (messages[0].role == 'system') | int) %}{{ raise_exception('alternate') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}\n{% endfor %}"),
    "no system": (  # Gemma 2
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('alternate, and no system') }}{% endif %}<{{ m.role }}>"
        "{{ m.content }}\n{% endfor %}")}
USER = [("user", "Tell me."), ("user", "A tale.")]


@pytest.mark.parametrize("sent", [
    [("system", "Be brief."), *USER, ("system", "It is May.")],  # Claude Code
    [("system", "Be brief."), ("developer", "It is May."), *USER],  # Codex
    [("system", "Be brief."), ("system", "It is May."), *USER],  # opencode
    [("developer", "Be brief."), *USER, ("assistant", "Yes."), ("system", "It is May."),
     ("user", "Go on.")]], ids=["Claude Code", "Codex", "opencode", "late"])
@pytest.mark.parametrize("name", RULES)
def test_what_agents_say_to_the_system_is_written(name, sent):
    """Templates refused the first three, or dropped texts."""
    chat = [("system", "Be brief.\nIt is May."), *[one for one in sent if one[0] in (
        "user", "assistant")]]
    joined = "\n".join(text for _, text in USER)
    if name == "turns alternate":
        chat[1:3] = [("user", joined)]
    elif name == "no system":
        chat[:3] = [("user", f"{chat[0][1]}\n{joined}")]
    assert rendered(RULES[name], [dict(role=role, content=text) for role, text in sent]) == "".join(
        f"<{role}>{text}\n" for role, text in chat)


def test_a_text_beside_a_call_goes_with_a_warning_if_the_template_wants_it():
    """Llama's writes the call alone. The second turn of each agent was refused."""
    chat = [dict(role="user", content="Hi"), dict(role="assistant", content="I look.", tool_calls=[
        call("{}")]), dict(role="tool", tool_call_id="call_1", content="12")]
    with pytest.warns(UserWarning, match="no text beside a call: .* goes on without"):
        assert got("llama 3.1", chat) == (
            '<user>Hi{"name": "weather", "parameters": {}}<ipython>"12"')


def test_a_text_in_front_of_a_call_does_not_belong_to_it():
    """Joined with the call, because turns must alternate, it was dropped as if it decorated it."""
    alone = ("{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1]"
             ".role %}{{ raise_exception('alternate') }}{% endif %}{% if m.tool_calls %}"
             "{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}{% endfor %}")
    with pytest.raises(ValueError, match="refuses this conversation: alternate"):
        rendered(alone, [dict(role="user", content="Hi"), dict(role="assistant", content="Mind!"),
                         dict(role="assistant", content="", tool_calls=[call("{}")])])


def test_a_turn_without_a_thought_is_not_tried_with_one():
    """This template writes one of both, so the text would seem lost."""
    either = ("{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or m.content }}"
              "{% endfor %}")
    assert rendered(either, [dict(role="system", content="Be brief."), dict(
        role="assistant", content="Yes.")]) == "<system>Be brief.<assistant>Yes."


THINKS = (  # gpt-oss: a thought or a text, and the first call alone
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.reasoning_content %}"
    "{{ raise_exception('one of both') }}{% endif %}<{{ m.reasoning_content }}{{ m.content }}>"
    "{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %};{% endfor %}")


def test_a_text_between_a_thought_and_a_call_joins_the_thought():
    sent = dict(role="assistant", content="I look.", reasoning_content="Hm.",
                tool_calls=[call("{}")])
    assert rendered(THINKS, [sent]) == "<Hm.\nI look.>weather{};"
    assert rendered(THINKS, [sent | dict(content="")]) == "<Hm.>weather{};"
    with pytest.warns(UserWarning, match="no text beside a call"):  # nor the thought
        assert rendered(THINKS.replace("<{{ m.reasoning_content }}{{ m.content }}>", ""), [
            sent]) == "weather{};"


def test_calls_come_one_by_one_where_a_template_takes_one():
    """Ids may come again in a later turn."""
    two = [call("{}"), call('{"city": "Rome"}') | dict(id="call_2")]
    turn = [dict(role="assistant", content="", tool_calls=two),
            dict(role="tool", tool_call_id="call_1", content="12"),
            dict(role="tool", tool_call_id="call_2", content="25")]
    once = '<>weather{};<tool>12;<>weather{"city": "Rome"};<tool>25;'
    assert rendered(THINKS, turn * 2) == once * 2
    assert got("llama 3.1", turn).count('"parameters"') == 2


TOOLS = ("{% for t in tools %}{{ t.function.name + ': ' + t.function.description }}{% for key, one "
         "in t.function.parameters.properties.items() %} {{ key }}{% endfor %};{% endfor %}"
         "{% for m in messages %}{{ m.content }}{% endfor %}")


@pytest.mark.parametrize("nothing", [{}, dict(description=None, parameters=None),
                                     dict(parameters={})], ids=str)
def test_tools_without_a_description_or_parameters_have_empty_ones(nothing):
    def tool(**entries):
        return dict(type="function", function=dict(name="now") | entries)
    full = tool(description="Counts.", parameters=dict(type="object", properties=dict(city={})))
    chat = [dict(role="user", content="Hi")]
    assert rendered(TOOLS, chat, [full, tool(**nothing)]) == "now: Counts. city;now: ;Hi"
    whole = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert rendered(whole, chat, [tool(**nothing)]) == (  # as they are, if that will do
        '[{"type": "function", "function": {"name": "now"}}]Hi')


@pytest.mark.parametrize(("content", "text"), [
    (None, ""), (12, "12"), (1.5, "1.5"), (True, "true"), ({"a": "é"}, '{"a": "é"}')], ids=str)
def test_a_result_may_be_any_value(content, text):
    assert got("chatml", [dict(role="tool", content=content)]) == f"<tool>{text}\n"


def test_a_call_may_be_a_function_alone():
    bare = dict(name="weather", arguments='{"city": "Rome"}')
    assert got("mistral", [dict(role="assistant", tool_calls=[bare])]) == (
        '[assistant]{"name": "weather", "arguments": {"city": "Rome"}}')


def test_texts_have_several_kinds_of_parts():
    """OpenAI's and Anthropic's."""
    document = dict(type="document", title="Notes", source=dict(
        type="text", media_type="text/plain", data=" A text."))
    blocks = dict(type="document", source=dict(type="content", content=[
        dict(type="text", text="A block.")]))
    assert got("chatml", [dict(role="user", content=[
        dict(type="input_text", text="Hi"), document, blocks])]) == (
            "<user>Hi\nNotes\n A text.\nA block.\n")
    assert rendered(THOUGHTS, [dict(role="assistant", content=[
        dict(type="thinking", thinking="Hm.", signature="x"),
        dict(type="output_text", text="No:"), dict(type="refusal", refusal="I can't.")])]) == (
            "<Hm.>No:\nI can't.")
    thought = [dict(type="text", text="H"), dict(type="text", text="m.")]  # Mistral's, as a list
    assert rendered(THOUGHTS, [dict(role="assistant", content=[
        dict(type="thinking", thinking=thought, closed=True), dict(type="text", text="No.")])]) == (
            "<Hm.>No.")
    for wrong in ([5], [dict(type="image")], 5, dict(text="Hm.")):
        with pytest.raises(ValueError, match=r"messages.0.content.0: "):
            rendered(THOUGHTS, [dict(role="assistant", content=[
                dict(type="thinking", thinking=wrong)])])


def test_what_looks_like_python_in_a_text_is_no_fault_of_the_template():
    """A result that quoted the arguments as Python prints them: all calls were JSON in quotes."""
    chat = [dict(role="user", content="see {'a': 1}"),
            dict(role="assistant", reasoning_content="{'a': 1}", tool_calls=[call({"a": 1})]),
            dict(role="tool", content="{'a': 1}")]
    assert '"parameters": {"a": 1}}' in got("llama 3.1", chat)
    quoted = "[{'type': 'text', 'text': ''}]"
    assert quoted in got("chatml", [dict(role="user", content=quoted),
                                    dict(role="assistant", content="")])


SEE = {  # templates of models that see: by parts or a text; texts behind all images
    "qwen vl": (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' or 'image' in p %}[I]{% elif 'text' in p "
        "%}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"),
    "llava": (
        "{% for m in messages %}<{{ m.role }}>{% for p in m['content'] | selectattr('type', "
        "'equalto', 'image') %}[I]{% endfor %}{% for p in m['content'] | selectattr('type', "
        "'equalto', 'text') %}{{ p['text'] + ' ' }}{% endfor %};{% endfor %}")}


@pytest.mark.parametrize(("name", "written"), [
    ("qwen vl", "<system>Be brief.;<user>Hi [I] and [I]?;<assistant>A cat.;"),
    ("llava", "<system>Be brief. ;<user>[I][I]Hi   and  ? ;<assistant>A cat. ;")])
def test_images_stay_among_their_texts(name, written):
    image = Taken(type="image")
    chat = [dict(role="system", content="Be brief."), dict(role="user", content=[
        dict(type="text", text="Hi "), image, dict(type="text", text=" and "), image,
        dict(type="text", text="?")]), dict(role="assistant", content="A cat.")]
    assert rendered(SEE[name], chat) == written


def test_calls_beside_images_are_in_the_templates_form_too():
    """A conversation with images was once handed to the template as it came."""
    chat = [dict(role="user", content=[Taken(type="image")]),
            dict(role="assistant", content=None, tool_calls=[call('{"city": "Rome"}')]),
            dict(role="tool", content=[dict(type="text", text="12"), Taken(type="image")])]
    assert rendered(SEE["qwen vl"], chat) == (
        '<user>[I];<assistant>weather{"city": "Rome"};<tool>12[I];')
    with pytest.warns(UserWarning, match="not write all calls"):
        assert "weather" not in rendered(SEE["llava"], chat)
    with pytest.raises(ValueError, match="does not write this message"):  # its second text
        rendered("{% for m in messages %}{{ m.content[0].text }}{% endfor %}", [
            dict(role="user", content=[Taken(type="image"), dict(type="text", text="zz")])])


def test_a_long_conversation_is_looked_through_once():
    """Looking for each of 1,000 texts from the beginning of the prompt on took 0.3 s."""
    chat = [dict(role=("user", "assistant")[i % 2], content=f"text {i} " * 100)
            for i in range(1000)]
    searched = []

    class Prompt(str):
        def find(self, text, at):
            found = str.find(self, text, at)
            searched.append(found + len(text) - at)
            return found

    prompt = render_messages(chat, lambda messages: Prompt(
        "\n".join(message["content"] for message in messages)))
    assert sum(searched) <= len(prompt) and len(searched) == 1000
