"""The offline API over an engine with a scripted backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fourfold import LLM, SamplingParams, StructuredOutputsParams
from fourfold.errors import ConfigError, InvalidRequestError, ModelNotFoundError

from .conftest import EOS, ScriptedBackend

Say = Callable[..., ScriptedBackend]


def ids(text: str) -> list[int]:
    return list(text.encode())


def test_texts_and_ids_in_order(tiny: Path, say: Say) -> None:
    say("héllo")
    with LLM(str(tiny)) as llm:
        outputs = llm.generate(["one", ids("three"), "two"], SamplingParams(max_tokens=None), use_tqdm=False)
    assert [o.prompt for o in outputs] == ["one", None, "two"]
    assert [o.prompt_token_ids for o in outputs] == [ids("one"), ids("three"), ids("two")]
    for output in outputs:
        (answer,) = output.outputs
        assert answer.text == "héllo"
        assert answer.token_ids == [*ids("héllo"), EOS]
        assert (answer.finish_reason, answer.stop_reason, answer.logprobs) == ("stop", None, None)


def test_one_prompt_of_either_kind(tiny: Path, say: Say) -> None:
    say("x")
    with LLM(str(tiny)) as llm:
        assert llm.generate("one", use_tqdm=False)[0].prompt == "one"
        assert llm.generate(ids("one"), use_tqdm=False)[0].prompt_token_ids == ids("one")
        assert llm.generate([], use_tqdm=False) == []


def test_prompts_as_vllm_spells_them(tiny: Path, say: Say) -> None:
    say("x")
    with LLM(str(tiny)) as llm:
        first, second = llm.generate([{"prompt": "one"}, {"prompt_token_ids": ids("two")}], use_tqdm=False)
        assert (first.prompt, first.prompt_token_ids) == ("one", ids("one"))
        assert (second.prompt, second.prompt_token_ids) == (None, ids("two"))
        assert llm.generate({"prompt": "one"}, use_tqdm=False)[0].prompt == "one"
        array = np.frombuffer(b"two", np.uint8)
        assert llm.generate([array], use_tqdm=False)[0].prompt_token_ids == ids("two")  # type: ignore[list-item]
        for wrong, complaint in (
            ({"prompt": "a", "prompt_token_ids": [1]}, "either prompt or prompt_token_ids"),
            ({"promt": "a"}, r"fields \['promt'\]"),
            ({}, "either"),
            ([["a", 1]], "a text or a list of token ids"),
            ([None], "a text or a list of token ids, got 'None'"),
            ([[1.5]], "a text or a list"),
        ):
            with pytest.raises(InvalidRequestError, match=complaint):
                llm.generate(wrong, use_tqdm=False)  # type: ignore[arg-type]


def test_params_per_prompt_n_and_limits(tiny: Path, say: Say) -> None:
    say("abcdef")
    params = [SamplingParams(max_tokens=2, n=3), SamplingParams(stop=("d",), max_tokens=20)]
    with LLM(str(tiny)) as llm:
        first, second = llm.generate(["p", "q"], params, use_tqdm=False)
        assert llm._engine.stats().live_blocks == 0
        with pytest.raises(InvalidRequestError, match="2 sampling params for 1 prompts"):
            llm.generate("p", params)
    assert [(a.index, a.text, a.finish_reason) for a in first.outputs] == [
        (i, "ab", "length") for i in range(3)
    ]
    assert [(a.text, a.finish_reason, a.stop_reason) for a in second.outputs] == [("abc", "stop", "d")]


def test_structured_outputs(tiny: Path, say: Say) -> None:
    say("yellow")
    choice = StructuredOutputsParams(choice=["yes", "no"])
    free, bound = SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, structured_outputs=choice)
    with LLM(str(tiny)) as llm:
        for output in (
            llm.generate("p", bound, use_tqdm=False)[0],
            llm.chat([{"role": "user", "content": "p"}], bound, use_tqdm=False)[0],
        ):
            # The script says "y"; what must follow is not asked of it, and neither is the end.
            assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("yes", "stop")
        both = llm.generate(["p", "p"], [free, bound], use_tqdm=False)
        assert [each.outputs[0].text for each in both] == ["yellow", "yes"]
        wrong = StructuredOutputsParams(grammar="start: nothing")
        with pytest.raises(InvalidRequestError, match="nothing"):
            llm.generate("p", SamplingParams(structured_outputs=wrong), use_tqdm=False)
        for unclear in (StructuredOutputsParams(), StructuredOutputsParams(regex="a", json_object=True)):
            with pytest.raises(InvalidRequestError, match="must say one of json, regex"):
                llm.generate("p", SamplingParams(structured_outputs=unclear), use_tqdm=False)


def test_logprobs(tiny: Path, say: Say) -> None:
    say("ab")
    with LLM(str(tiny)) as llm:
        (output,) = llm.generate(
            "pq", SamplingParams(logprobs=1, prompt_logprobs=0, max_tokens=2), use_tqdm=False
        )
    (answer,) = output.outputs
    assert answer.logprobs is not None
    assert [(e.token, e.logprob, e.top[0].token) for e in answer.logprobs] == [
        ("a", -0.5, "A"),
        ("b", -0.5, "A"),
    ]
    assert answer.cumulative_logprob == -1.0
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [e.token_id for e in output.prompt_logprobs[1:] if e] == ids("q")


def test_chat_renders_the_template(tiny: Path, say: Say) -> None:
    say("hi")
    with LLM(str(tiny)) as llm:
        (output,) = llm.chat([{"role": "user", "content": "yo"}], use_tqdm=False)
        assert output.prompt == "<|im_start|>user\nyo<|im_end|>\n<|im_start|>assistant\n"
        assert output.prompt_token_ids[0] == 256
        assert output.outputs[0].text == "hi"
        assert len(llm.chat([[{"role": "user", "content": "a"}]] * 2, use_tqdm=False)) == 2
        with pytest.raises(InvalidRequestError, match="messages is empty"):
            llm.chat([])


TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def test_chat_with_tools_and_variables(tiny: Path, say: Say) -> None:
    say("ok")
    user = {"role": "user", "content": "yo"}
    with LLM(str(tiny)) as llm:
        # This model's own template has no place for tools: they are described in the system message.
        (output,) = llm.chat([user], use_tqdm=False, tools=[TOOL])
        assert output.prompt is not None
        assert output.prompt.startswith("<|im_start|>system\n")
        assert '"name": "add"' in output.prompt
        template = "{{ tools[0].function.name }} {{ mood }} {{ messages[-1].content }}"
        (output,) = llm.chat(
            [user], use_tqdm=False, tools=[TOOL], chat_template=template, chat_template_kwargs={"mood": "?"}
        )
        assert output.prompt == "add ? yo"
        begun = [user, {"role": "assistant", "content": "We"}]
        (output,) = llm.chat(begun, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
        assert (output.prompt or "").endswith("<|im_start|>assistant\nWe")
        with pytest.raises(InvalidRequestError, match=r"tools\[0\].function.name must be"):
            llm.chat([user], tools=[{"type": "function", "function": {"name": "a b"}}])


def test_leaving_a_stream_frees_its_blocks(tiny: Path, say: Say) -> None:
    say("a" * 100)
    with LLM(str(tiny)) as llm:
        stream = llm.stream(ids("p"), SamplingParams(max_tokens=100))
        assert next(stream).text == "a"
        assert llm._engine.stats().live_blocks > 0
        stream.close()
        assert llm._engine.stats().live_blocks == 0


@pytest.mark.parametrize(
    "prompt,params,words",
    [
        ([], SamplingParams(), None),
        ("", SamplingParams(), "prompt is empty"),
        ([-1], SamplingParams(), "token id -1"),
        ([259], SamplingParams(), "token id 259"),
        ("a" * 600, SamplingParams(), "600 in the prompt"),
        ("a" * 500, SamplingParams(max_tokens=13), "500 in the prompt, 13"),
        ("a", SamplingParams(temperature=-1), "temperature"),
        ("a", SamplingParams(logit_bias={999: 1.0}), "999"),
    ],
)
def test_bad_requests(tiny: Path, say: Say, prompt: str, params: SamplingParams, words: str | None) -> None:
    say("x")
    with LLM(str(tiny)) as llm:
        if words is None:
            assert llm.generate(prompt, params) == []
            return
        with pytest.raises(InvalidRequestError, match=words):
            llm.generate(["good", prompt], params)
        assert llm.generate("good", use_tqdm=False)[0].outputs[0].text == "x"


def test_prompts_are_not_cut_for_a_pace_that_nobody_sees(tiny: Path, say: Say) -> None:
    sizes: list[int] = []
    say("x" * 8, lambda batch: sizes.append(len(batch.tokens)))
    prompts = [ids("abcd"), *(ids(letter * 60) for letter in "efg")]
    with LLM(str(tiny), max_num_batched_tokens=64) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=8), use_tqdm=False)
    assert max(sizes) == 64
    assert sum(size > 4 for size in sizes) == 3, "184 tokens of prompts in three steps"
    with LLM(str(tiny), max_itl_ratio=2.0) as llm:
        assert llm.config.max_itl_ratio == 2.0


def test_the_backend_is_closed(tiny: Path, say: Say) -> None:
    backend = say("x")
    with LLM(str(tiny)):
        assert not backend.closed
    assert backend.closed


def test_unknown_settings_and_models(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="'max_seq_len'; did you mean max_model_len"):
        LLM(str(tiny), max_seq_len=3)
    with pytest.raises(ConfigError, match="threads must be between 1"):
        LLM(str(tiny), threads=0)
    with pytest.raises(ModelNotFoundError, match="no model 'gone"):
        LLM("gone.gguf")
