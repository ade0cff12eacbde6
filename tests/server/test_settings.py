"""Settings: safe where nothing is said, refused where they make no sense, silent about secrets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kqview.engine_options import DEFAULTS
from kqview.errors import RequestError
from kqview.server import Settings
from kqview.server.api.wire.fields import FIELDS as FIELDS_OF_REQUESTS
from kqview.server.settings import values_in
from kqview.types.sampling import OPTIONS

FIELDS = [spec.name for spec in dataclasses.fields(Settings)]
LISTS = (
    "aliases",
    "lora",
    "sampling",
    "template_options",
    "api_keys",
    "admin_keys",
    "cors_origins",
    "allowed_hosts",
    "trusted_proxies",
)
SECRET = "sesame-9f2c"


def test_defaults_can_be_reached_from_this_machine_alone():
    settings = Settings()
    assert (settings.host, settings.public, settings.query_key) == ("127.0.0.1", False, False)
    assert settings.api_keys == settings.admin_keys == ()
    settings.check_bind()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"])
def test_loopback_address_needs_no_key(host: str):
    Settings(host=host).check_bind()


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "192.168.0.7", "2001:db8::1", "example.org", "localhost.evil.org"]
)
def test_public_address_without_a_key_is_refused(host: str):
    with pytest.raises(RequestError, match="api_keys"):
        Settings(host=host).check_bind()
    # A key to switch models does not close the rest.
    with pytest.raises(RequestError, match="api_keys"):
        Settings(host=host, admin_keys=(SECRET,)).check_bind()
    Settings(host=host, api_keys=(SECRET,)).check_bind()
    Settings(host=host, public=True).check_bind()


@pytest.mark.parametrize("name", FIELDS)
def test_wrong_type_is_refused_in_every_field(name: str):
    of_lists = ["text", None, (1,), ("",), 5]
    for value in ([1], {"a": 1}, b"x", 1j, object(), *(of_lists if name in LISTS else [("a",)])):
        with pytest.raises(RequestError, match=name):
            Settings(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("n_slots", 0),
        ("n_slots", True),
        ("max_body_bytes", 0),
        ("max_queued", -1),
        ("max_running", 1.5),
        ("request_timeout_s", float("nan")),
        ("idle_timeout_s", 0),
        ("idle_timeout_s", float("inf")),
        ("rate_limit", -1),
        ("attention_values", "weights"),
        ("attention_format", "sparse"),
        ("demo", 1),
        ("template_options", ("low",)),
        ("template_options", ("a b=low",)),
        ("sampling", ("temperature",)),
        ("sampling", ("warmth=1",)),
        ("sampling", ("stop=1",)),
        ("sampling", ("top_k=many",)),
    ],
)
def test_value_out_of_range_is_refused(name: str, value: Any):
    with pytest.raises(RequestError, match=name):
        Settings(**{name: value})


@pytest.mark.parametrize("name", ["api_keys", "admin_keys"])
@pytest.mark.parametrize("key", ["two words", "ключ", "tab\t", "line\n"])
def test_key_that_no_header_can_carry_is_refused_without_being_shown(name: str, key: str):
    with pytest.raises(RequestError) as caught:
        Settings(**{name: (key,)})
    assert key not in str(caught.value)


def test_keys_are_not_shown_by_repr():
    assert SECRET not in repr(Settings(api_keys=(SECRET,), admin_keys=(SECRET,)))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("http://localhost:8080/", "http://localhost:8080"),
        ("HTTPS://Example.ORG", "https://example.org"),
        ("*", "*"),
        ("null", "null"),
        ("loopback", "loopback"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_origin_is_kept_as_browsers_send_it(given: str, kept: str):
    assert Settings(cors_origins=(given,)).cors_origins == (kept,)


@pytest.mark.parametrize(
    "origin", ["example.org", "http://", "http://a/b", "http://a?b", "://a", "a b"]
)
def test_origin_that_no_browser_sends_is_refused(origin: str):
    with pytest.raises(RequestError, match="cors_origins"):
        Settings(cors_origins=(origin,))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("127.0.0.1", "127.0.0.1/32"),
        ("10.1.2.3/8", "10.0.0.0/8"),
        ("2001:DB8::/32", "2001:db8::/32"),
    ],
)
def test_proxies_are_kept_as_networks(given: str, kept: str):
    assert Settings(trusted_proxies=(given,)).trusted_proxies == (kept,)


@pytest.mark.parametrize("proxy", ["*", "nginx", "10.0.0.0/33", "10.0.0", "127.0.0.1:80", "::/129"])
def test_proxy_that_is_no_address_is_refused(proxy: str):
    with pytest.raises(RequestError, match="trusted_proxies"):
        Settings(trusted_proxies=(proxy,))


def test_environment_is_read():
    environ = {
        "KQVIEW_PORT": "6001",
        "KQVIEW_API_KEYS": " a, b ,",
        "KQVIEW_QUERY_KEY": "Yes",
        "KQVIEW_RATE_LIMIT": "2.5",
        "KQVIEW_N_CTX": "",
        "KQVIEW_MODEL": "",
        "KQVIEW_CORS_ORIGINS": "",
        "KQVIEW_TEMPLATE_OPTIONS": 'xs=["p,q=r", 2], n=3',
        "KQVIEW_CUDA_ARCH": "not ours",
        "OTHER": "1",
    }
    settings = Settings(**values_in(environ))
    assert settings.port == 6001
    assert settings.host == "127.0.0.1"
    assert settings.api_keys == ("a", "b")
    assert settings.query_key is True
    assert settings.rate_limit == 2.5
    assert settings.n_ctx is None
    assert settings.model is None
    assert settings.cors_origins == ()
    assert settings.template_variables == {"xs": ["p,q=r", 2], "n": 3}


@pytest.mark.parametrize(
    ("name", "text"), [("PORT", "http"), ("RATE_LIMIT", "nan"), ("DEMO", "2"), ("N_CTX", "1e3")]
)
def test_environment_that_cannot_be_read_is_refused(name: str, text: str):
    with pytest.raises(RequestError, match=name.lower()):
        Settings(**values_in({f"KQVIEW_{name}": text}))


def test_variables_of_the_template_are_json_or_text():
    given = ("effort=low", "n=3", "keeps=false", 'list=["a", 1]', "words=two words", "empty=")
    assert Settings(template_options=given, reasoning="on").template_variables == {
        "enable_thinking": True, "effort": "low", "n": 3, "keeps": False, "list": ["a", 1],
        "words": "two words", "empty": "",
    }  # fmt: skip
    assert Settings(reasoning="off").template_variables == {"enable_thinking": False}
    assert Settings().template_variables == {}


def test_defaults_of_sampling_are_numbers_in_range():
    settings = Settings(sampling=("temperature=0.6", "top_k=20", "seed=5"))
    assert settings.sampling_defaults == {"temperature": 0.6, "top_k": 20, "seed": 5}
    with pytest.raises(RequestError, match="top_p"):
        Settings(sampling=("top_p=2",))


def test_each_default_of_sampling_counts_where_a_request_leaves_it_open():
    assert {name for name, one in OPTIONS.items() if one.low is not None} <= {
        *FIELDS_OF_REQUESTS.fields
    }


@pytest.mark.parametrize(
    ("setting", "option"),
    [
        ("n_slots", "n_slots"), ("n_ctx", "n_ctx"), ("n_threads", "n_threads"),
        ("n_gpu_layers", "n_gpu_layers"), ("kv_type", "kv_type"), ("flash_attn", "flash_attn"),
        ("attention_kernel", "attention_kernel"), ("ubatch_size", "n_ubatch"),
        ("pinned_bytes", "pinned_bytes"), ("pooling", "pooling"),
        ("attention_budget_bytes", "attention_budget_bytes"),
        ("checkpoint_bytes", "checkpoint_bytes"),
    ],
)  # fmt: skip
def test_defaults_of_the_engine_are_its_own(setting: str, option: str):
    assert getattr(Settings(), setting) == DEFAULTS[option]
