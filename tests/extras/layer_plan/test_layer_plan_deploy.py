"""A plan changes between two steps: no request is lost, and no text is another one."""

import pytest
from small_engine import drain
from test_layer_plan import PARAMS, SMALL

from nanoserve import LLM, SamplingParams


def texts(llm: LLM, prompts: list, plans: list, every: int = 4) -> dict[str, list]:
    """Step by step; after some steps the layers go elsewhere."""
    plans = list(plans)
    for i, prompt in enumerate(prompts):
        llm.add_request(str(i), prompt, PARAMS[i % len(PARAMS)])
    found, num_steps = {}, 0
    while llm.has_unfinished_requests():
        for out in llm.step():
            found[out.request_id] = [(one.token_ids, one.text) for one in out.outputs]
        num_steps += 1
        if num_steps % every == 0 and plans:
            llm.deploy(plans.pop(0))
    assert not plans, "it ended too early"
    return found


@pytest.mark.parametrize("name, options, plans", [
    ("qwen3", dict(layer_plan={"disk": 0}), [{"disk": 3}, {"disk": 1}, {"device": 3}]),
    ("gemma2", dict(layer_plan=[1, 2], max_num_batched_tokens=30), [[2, 1], [{"disk": 1}, 2]]),
    ("llama3.2", dict(pipeline_parallel_size=2, tensor_parallel_size=2), [[1, 2], [2, 1]]),
    ("mistral", dict(layer_plan=[2, 1], num_gpu_blocks_override=16, max_model_len=190,
                     quantization="int8"), [[1, 2], [2, 1]])], ids=str)
def test_no_request_is_lost_and_no_text_changes(name, options, plans, checkpoints, prompts,
                                                ranks_in_threads):
    options = SMALL | options
    kept = {key: value for key, value in options.items() if key in SMALL or key == "quantization"}
    with LLM(checkpoints[name], **kept | dict(num_gpu_blocks_override=64)) as llm:
        expected = texts(llm, prompts[1:7], [])
    with LLM(checkpoints[name], **options) as llm:
        for these in (plans, plans[::-1]):
            assert texts(llm, prompts[1:7], these) == expected
        free = llm.scheduler.blocks.num_free_blocks
        assert free == llm.scheduler.blocks.num_blocks


def test_a_plan_that_cannot_be_followed_changes_nothing(checkpoints, prompts, ranks_in_threads):
    greedy = SamplingParams(temperature=0, max_tokens=8)
    with LLM(checkpoints["qwen3"], **SMALL, layer_plan=[1, 2]) as llm:
        expected = llm.generate(prompts[4], greedy)[0].outputs[0].token_ids
        llm.add_request("running", prompts[4], greedy)
        llm.step()
        for plan, message in (([1, 1, 1], "is for 3 stages, and the engine has 2"),
                              ({"disk": 1}, "is for 1 stages"), ([3, 1], "all together the 3"),
                              ("all on disk", "layer_plan must be how many layers")):
            with pytest.raises(ValueError, match=message):
                llm.deploy(plan)
        assert drain(llm)["running"][-1].outputs[0].token_ids == expected
    with LLM(checkpoints["qwen3"], **SMALL) as llm, pytest.raises(ValueError, match="'disk': 0"):
        llm.deploy({"disk": 1})


@pytest.mark.parametrize("plan", [[2, 1], {"disk": 2}], ids=str)
def test_new_weights_sleep_and_deploy_go_together(checkpoints, prompts, ranks_in_threads, plan):
    """A trainer's tensors reach the layers where they are. They can't be read again, so the layers
    stay there."""
    from safetensors.torch import load_file

    greedy = SamplingParams(temperature=0, max_tokens=8)
    stored = load_file(checkpoints["qwen3"] / "model.safetensors")
    others = {name: tensor.flip(0) if "proj" in name else tensor
              for name, tensor in stored.items()}

    def text(llm):
        return llm.generate(prompts[4], greedy, use_tqdm=False)[0].outputs[0].token_ids

    with LLM(checkpoints["qwen3"], **SMALL) as llm:
        first = text(llm)
        llm.update_weights(others)
        second = text(llm)
    assert first != second
    with LLM(checkpoints["qwen3"], **SMALL, layer_plan=plan) as llm:
        assert text(llm) == first
        llm.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            llm.deploy(plan)
        llm.wake_up()
        assert text(llm) == first
        llm.update_weights(others)
        assert text(llm) == second
        with pytest.raises(ValueError, match="other weights since update_weights"):
            llm.deploy(plan)
        assert text(llm) == second
