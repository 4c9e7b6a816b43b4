"""Promises of the server, kept to the real openai package over a real connection."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import numpy as np
import pytest

httpx = pytest.importorskip("httpx", reason="the extra dev is not installed")
openai = pytest.importorskip("openai", reason="the extra dev is not installed")
app = pytest.importorskip("leap.serve.app", reason="the extra serve is not installed")
completions = pytest.importorskip("leap.serve.completions")
engine = pytest.importorskip("leap.serve.engine")
Access, Limits, Engine, make_app = app.Access, completions.Limits, engine.Engine, app.make_app


@pytest.fixture
def serve(build, live):
    """Makes servers of a tiny model."""

    def make(kind="leapformer", access=None, wrap=lambda model: model, **settings):
        made = live(make_app(engine=Engine(wrap(build(kind)), **settings), access=access))
        made.engine = made.app.state.engine
        return made

    return make


@pytest.fixture
def client():
    """Makes clients, and closes them."""
    with contextlib.ExitStack() as stack:

        def make(server, **options):
            given = {"api_key": "none", "max_retries": 0, "timeout": 60} | options
            made = openai.OpenAI(base_url=f"{server.url}/v1", **given)
            return stack.enter_context(made)

        yield make


def post(server, body, **options):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{server.url}/v1/completions", content=content, timeout=60, **options)


def wait_until(true):
    for _ in range(2000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it never came true")


def test_the_openai_package_works_unchanged(serve, client, engine_of, ask, told, build):
    server = serve()
    user = client(server)
    assert [model.id for model in user.models.list()] == ["leapformer"]
    assert user.models.retrieve("leapformer").id == "leapformer"
    text, reason, written = told(ask(engine_of(build("leapformer")), "Once", max_tokens=9))
    reply = user.completions.create(model="leapformer", prompt="Once", max_tokens=9, temperature=0)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason) == (text, reason)
    assert reply.object == "text_completion" and reply.id.startswith("cmpl-")
    assert reply.usage.prompt_tokens == 5 and reply.usage.completion_tokens == len(written)
    assert reply.usage.total_tokens == 5 + len(written)

    streamed = user.completions.create(
        model="leapformer", prompt="Once", max_tokens=9, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *parts, last, used = streamed
    assert "".join(part.choices[0].text for part in (*parts, last)) == text
    assert last.choices[0].finish_reason == reason
    assert not used.choices and used.usage == reply.usage


def test_several_prompts_and_replies_keep_their_order(serve, client):
    user = client(serve())
    settings = {"model": "leapformer", "max_tokens": 6, "seed": 3}
    alone = [user.completions.create(prompt=p, **settings).choices[0].text for p in ("a", "b")]
    reply = user.completions.create(prompt=["a", "b"], n=2, **settings)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == [alone[0]] * 2 + [alone[1]] * 2
    parts = list(user.completions.create(prompt=["a", [98]], stream=True, **settings))
    for index in (0, 1):
        said = [c.text for part in parts for c in part.choices if c.index == index]
        assert "".join(said) == alone[index]


def test_probabilities_are_told(serve, client, build):
    reply = client(serve()).completions.create(
        model="leapformer", prompt="ab", max_tokens=4, temperature=0, logprobs=2
    )
    found = reply.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 4
    for own, likeliest in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert own == pytest.approx(max(likeliest.values())) and own < 0
    served = build("leapformer")
    logits, _ = served.read([[256, 97, 98]], served.empty())
    exact = logits[0] - np.log(np.exp(logits[0].astype(float)).sum())
    assert found.token_logprobs[0] == pytest.approx(exact.max(), rel=1e-5)


def test_a_reply_goes_on_from_its_state_forked_saved_and_loaded(serve, client, tmp_path):
    server = serve(access=Access(folder=tmp_path))
    user = client(server)
    settings = {"model": "leapformer", "temperature": 0}
    whole = user.completions.create(prompt="Once", max_tokens=12, logprobs=0, **settings)
    first = user.completions.create(prompt="Once", max_tokens=5, logprobs=0, **settings)
    state = first.choices[0].state
    expected = whole.choices[0].logprobs.token_logprobs[5:]

    def rest(name):
        reply = user.completions.create(
            prompt="", max_tokens=7, logprobs=0, extra_body={"state": name}, **settings
        )
        return reply.choices[0].logprobs.token_logprobs

    assert rest(state) == pytest.approx(expected)
    web = user._client  # As bare as httpx has it, at the same address.
    about = web.get(f"/states/{state}").json()
    assert (about["tokens"], about["object"]) == (9, "state") and about["bytes"] > 0
    fork = web.post(f"/states/{state}/fork").json()["id"]
    saved = web.post(f"/states/{state}/save", json={"name": "tale"}).json()
    assert saved["name"] == "tale" and (tmp_path / "tale.safetensors").is_file()
    assert web.delete(f"/states/{state}").json()["deleted"]
    gone = web.get(f"/states/{state}")
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "state_not_found"
    loaded = web.post("/states/load", json={"name": "tale"}).json()["id"]
    for name in (fork, loaded):
        assert rest(name) == pytest.approx(expected)
    with pytest.raises(openai.NotFoundError, match="there is no state 'state-x'"):
        rest("state-x")
    for name in ("../../etc", "", None, "a b", "x" * 65):
        refused = web.post(f"/states/{fork}/save", json={"name": name})
        assert refused.status_code == 400 and "name must be" in refused.text
    assert web.post("/states/load", json={"name": "other"}).status_code == 404


def test_a_state_of_another_model_is_refused_in_one_sentence(serve, client, tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"\0" * 50)
    server = serve(access=Access(folder=tmp_path))
    answer = httpx.post(f"{server.url}/v1/states/load", json={"name": "broken"})
    assert answer.status_code == 400
    assert "not a whole safetensors file" in answer.json()["error"]["message"]
    nowhere = httpx.post(f"{serve().url}/v1/states/load", json={"name": "broken"})
    assert "saves no states; start it with --states" in nowhere.json()["error"]["message"]


BAD = [
    (b"{prompt", "the body is no JSON"),
    (b"", "the body is no JSON"),
    (b"\xff\xfe", "the body is no JSON"),
    (b"[" * 100_000, "the body is no JSON"),
    ([1], "the body is a list; send an object"),
    ("text", "the body is text"),
    ({"max_tokens": -3}, "max_tokens=-3 must be from 1 to 100"),
    ({"max_tokens": 0}, "max_tokens=0 must be"),
    ({"max_tokens": 101}, "max_tokens=101 must be"),
    ({"max_tokens": 1.5}, "max_tokens is a number; give a whole number"),
    ({"max_tokens": True}, "max_tokens is true or false; give a whole number"),
    ({"max_tokens": "9"}, "max_tokens is text; give a whole number"),
    ({"temperature": -1}, "temperature=-1.0 must be 0 or more"),
    (b'{"temperature": NaN}', "temperature=nan must be 0 or more"),
    (b'{"temperature": 1e999}', "temperature=inf must be 0 or more"),
    ({"temperature": 10**400}, "temperature is too large"),
    ({"temperature": "hot"}, "temperature is text; give a number"),
    ({"top_p": 0}, "top_p=0.0 must be more than 0"),
    ({"n": 0}, "n=0 must be from 1 to 4"),
    ({"best_of": 2}, "best_of is not possible"),
    ({"seed": 10**30}, "must fit into 64 bits"),
    ({"seed": "x"}, "seed is text"),
    ({"logprobs": 9}, "logprobs=9 must be from 0 to 5"),
    ({"stop": [""]}, "stop must be text"),
    ({"stop": 3}, "stop must be text"),
    ({"stop": list("abcde")}, "5 stop strings are more than 4"),
    ({"stream": "yes"}, "stream is text; give true or false"),
    ({"stream_options": 1}, "stream_options is a number"),
    ({"prompt": {"a": 1}}, "prompt must be text, tokens, or a list of either"),
    ({"prompt": []}, "prompt must be text"),
    ({"prompt": [["a"]]}, "prompt must be text"),
    ({"prompt": [1, 257]}, "prompt has the token 257"),
    ({"prompt": [-1]}, "prompt has the token -1"),
    ({"prompt": ["a"] * 5}, "5 prompts with n=1 replies are more than the 4"),
    ({"prompt": "a" * 201}, "a prompt of 201 tokens is longer than the 200"),
    (b'{"prompt": "\\ud800"}', "prompt holds half a character at 0"),
    (b'{"\\ud800": 1}', "there is no setting"),
    ({"state": 1}, "state is a number"),
    ({"state": "nope"}, "there is no state 'nope'"),
    ({"model": "gpt-9"}, "there is no model 'gpt-9'; this server has 'leapformer'"),
    ({"model": 3}, "model is a number"),
    ({"suffix": "x"}, "suffix is not possible here"),
    ({"echo": True}, "echo is not possible here"),
    ({"logit_bias": {"3": 1}}, "logit_bias is not possible here"),
    ({"colour": "red"}, "there is no setting 'colour'; drop it"),
]


def test_bad_input_is_one_sentence_and_harms_nobody(serve, client):
    limits = Limits(max_tokens=100, max_prompt=200, max_choices=4)
    server = serve(access=Access(limits=limits, max_body=120_000))
    user = client(server)
    good = {"model": "leapformer", "prompt": "Once", "max_tokens": 60, "seed": 1}
    expected = user.completions.create(**good).choices[0].text
    said = []
    beside = threading.Thread(
        target=lambda: said.extend(user.completions.create(**good).choices[0].text for _ in "ab")
    )
    beside.start()
    for body, message in BAD:
        answer = post(server, body)
        error = answer.json()["error"]
        assert answer.status_code in (400, 404), (body, answer.text)
        assert message in error["message"] and "\n" not in error["message"], error
        assert error["type"] == "invalid_request_error"
    beside.join()
    assert said == [expected] * 2


def test_the_openai_package_raises_its_own_errors(serve, client):
    user = client(serve())
    with pytest.raises(openai.BadRequestError, match="max_tokens=-1 must be") as caught:
        user.completions.create(model="leapformer", prompt="a", max_tokens=-1)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        user.completions.create(model="other", prompt="a")
    with pytest.raises(openai.NotFoundError, match="there is nothing at /v1/chat/completions"):
        user.chat.completions.create(model="leapformer", messages=[])


def test_a_text_beyond_learned_positions_is_refused(serve, client):
    user = client(serve("learned"))
    with pytest.raises(openai.BadRequestError, match="more than the 512 positions") as caught:
        user.completions.create(model="learned", prompt="a" * 500, max_tokens=13)
    assert caught.value.code == "context_length_exceeded"
    user.completions.create(model="learned", prompt="a" * 500, max_tokens=12)


def test_a_body_that_is_too_large_is_refused_however_it_comes(serve):
    server = serve(access=Access(max_body=1000))
    for content in (b"x" * 1001, (part for part in [b"x" * 600] * 2)):
        answer = httpx.post(f"{server.url}/v1/completions", content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_without_the_token_nothing_is_told_but_health(serve, client):
    server = serve(access=Access(token="open-sesame"))
    assert httpx.get(f"{server.url}/healthz").json() == {"status": "ok"}
    for path in ("/metrics", "/v1/models"):
        assert httpx.get(server.url + path).status_code == 401
    with pytest.raises(openai.AuthenticationError, match="wants its token"):
        client(server).models.list()
    assert client(server, api_key="open-sesame").models.list().data


def test_pages_of_other_sites_are_refused(serve):
    server = serve()
    for origin, status in (("http://evil.example", 403), (server.url, 200), ("null", 403)):
        answer = httpx.get(f"{server.url}/v1/models", headers={"Origin": origin})
        assert answer.status_code == status


def test_too_many_are_told_when_to_try_again(serve, client):
    server = serve(slots=1, waiting=0, access=Access(limits=Limits(max_tokens=10**6)))
    user = client(server)
    stream = user.completions.create(
        model="leapformer", prompt="a", max_tokens=10**6, temperature=0, logprobs=0, stream=True
    )  # Greedy, as a drawn text may end at any token.
    next(iter(stream))
    with pytest.raises(openai.RateLimitError, match="all slots are taken") as caught:
        user.completions.create(model="leapformer", prompt="b")
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    stream.close()
    wait_until(lambda: server.engine.n_running == 0)
    assert user.completions.create(model="leapformer", prompt="b", max_tokens=2).choices


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_frees_its_slot(serve, stream):
    server = serve(slots=2, access=Access(limits=Limits(max_tokens=10**6)))
    asked = {"prompt": "a", "max_tokens": 10**6, "temperature": 0, "logprobs": 0, "stream": stream}
    body = json.dumps(asked)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as gone:
        gone.sendall((head + body).encode())
        wait_until(lambda: server.engine.n_running == 1)
    wait_until(lambda: server.engine.n_running == 0)
    assert server.engine._state is None and len(server.engine.states) == 0


def test_a_reply_ends_when_its_time_is_over(serve, client):
    server = serve(access=Access(seconds=0.3, limits=Limits(max_tokens=10**6)))
    reply = client(server).completions.create(
        model="leapformer", prompt="a", max_tokens=10**6, temperature=0
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens < 10**6


def test_a_model_that_fails_is_an_error_of_the_server_and_the_next_reply_is_well(
    serve, client, monkeypatch
):
    server = serve()
    user = client(server)
    model, read = server.engine.model, server.engine.model.read

    def fail(tokens, state):
        if ord("#") in tokens[0]:
            raise RuntimeError("oh")
        return read(tokens, state)

    monkeypatch.setattr(model, "read", fail)
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="could not go on with this text"):
            user.completions.create(model="leapformer", prompt="#", stream=stream)
    assert user.completions.create(model="leapformer", prompt="a", max_tokens=2).choices


def test_metrics_count_what_happened(serve, client):
    server = serve(block=16)
    user = client(server)
    for end in "ab":
        user.completions.create(model="leapformer", prompt="x" * 40 + end, max_tokens=5, seed=0)
    post(server, b"{")
    lines = dict(
        line.rsplit(" ", 1)
        for line in httpx.get(f"{server.url}/metrics").text.splitlines()
        if not line.startswith("#")
    )
    assert float(lines["leap_prompt_tokens_total"]) == 84
    assert float(lines["leap_shared_tokens_total"]) == 32
    assert float(lines['leap_refused_total{status="400"}']) == 1
    assert float(lines["leap_first_token_seconds_count"]) == 2
    assert float(lines["leap_states"]) == 2 and float(lines["leap_running"]) == 0
    assert float(lines["leap_written_tokens_total"]) > 0


def test_it_shuts_down_after_replies_that_are_under_way(serve, client):
    server = serve()
    said = []

    def ask():
        reply = client(server).completions.create(
            model="leapformer", prompt="a", max_tokens=200, seed=1, logprobs=0
        )
        said.append(reply.usage.completion_tokens)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: server.engine.n_running == 1)
    server.stop()
    asking.join(60)
    assert len(said) == 1
    assert not server.engine.is_alive
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/healthz")


def test_many_users_at_once_get_what_each_gets_alone(serve, client):
    server = serve(slots=8, block=16, budget=64)
    asked = [
        {"model": "leapformer", "prompt": "y" * (7 * i % 60), "max_tokens": 5 + i % 9, "seed": i}
        for i in range(24)
    ]
    one = client(server)
    expected = [one.completions.create(**each).choices[0].text for each in asked]

    async def all_at_once():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as many:

            async def streamed(each):
                parts = await many.completions.create(stream=True, **each)
                return "".join([part.choices[0].text async for part in parts])

            return await asyncio.gather(*map(streamed, asked))

    assert asyncio.run(all_at_once()) == expected
