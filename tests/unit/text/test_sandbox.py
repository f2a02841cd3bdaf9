"""Hostile templates: each ends with one line, soon, and without eating the machine's memory."""

import resource
import threading
import time

import pytest

from lorad.text.budget import MAX_VALUE, Budget, Exceeded
from lorad.text.template import ChatTemplate, TemplateError

_NS = "{% set ns = namespace(x=%s) %}{% for i in range(99) %}"
_BIG = "{% set b = 'a' * 1000000 %}"
HOSTILE = {
    # time
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "nested lists": "{% set r = range(99999) | list %}"
    "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
    "macro tree": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "endless macro": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "endless loop call": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "endless block": "{% block a %}{{ self.a() }}{% endblock %}",
    "sorting": "{% set l = range(99999) | list %}"
    "{% for i in range(99999) %}{% set x = l | sort %}{% endfor %}",
    "mapped tests": "{% set l = range(99999) | list %}"
    "{% for i in range(99999) %}{% set x = l | select('odd') | list %}{% endfor %}",
    # values that grow
    "product": "{{ 'a' * 10 ** 10 }}",
    "list product": "{{ [1] * 10 ** 10 }}",
    "folded at compile time": "{% if 'a' * 10 ** 10 %}{% endif %}",
    "tilde": _NS.replace("%s", "'aaaaaaaa'") + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "plus": _NS.replace("%s", "'aaaaaaaa'") + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "block set": _NS.replace("%s", "'aaaaaaaa'")
    + "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}{% endfor %}",
    "power": _NS.replace("%s", "3") + "{% set ns.x = ns.x ** 9 %}{% endfor %}",
    "squares": _NS.replace("%s", "3") + "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "printed twice": _NS.replace("%s", "[1]")
    + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "json twice": _NS.replace("%s", "1")
    + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
    "tuple twice": _NS.replace("%s", "1") + "{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
    "joined": _BIG + "{{ range(90000) | join(b) }}",
    "joined by method": _BIG + "{{ b.join(['a'] * 1000) }}",
    "replaced": _BIG + "{{ b | replace('a', b) }}",
    "replaced by method": _BIG + "{{ b.replace('', b) }}",
    "fields": _BIG + "{{ ('{0}' * 1000).format(b) }}",
    "percents": _BIG + "{{ ('%(b)s' * 1000) % {'b': b} }}",
    "format filter": _BIG + "{{ ('%s' * 1) | format(b * 9) }}",
    "split": "{{ ('a,' * 2000000).split(',') }}",
    "listed": "{{ ('a' * 2000000) | list }}",
    "mapped joins": _BIG + "{{ [range(9000) | list] * 9 | map('join', b) | list }}",
    "kept": _NS.replace("%s", "[]").replace("99)", "99999)")
    + "{% set ns.x = ns.x + [('a' * 100000) ~ i] %}{% endfor %}",
    # widths
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10 ** 9, 1) }}",
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "nested width": "{{ '{:>{w}}'.format(1, w=10 ** 9) }}",
    "indent": "{{ 'a' | indent(10 ** 9) }}",
    "json indent": "{{ [1] | tojson(indent=10 ** 9) }}",
    "round": "{{ 1.5 | round(10 ** 9) }}",
    "center": "{{ 'a'.center(10 ** 9) }}",
    "date": "{{ strftime_now('%Y' * 5000) }}",
    # output
    "output": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "literal output": "{% set x %}{% for i in range(99999) %}"
    + "x" * 9000
    + "{% endfor %}{% endset %}",
    "captured output": "{% set b = 'a' * 10000 %}{% set x %}{% for i in range(99999) %}{{ b }}"
    "{% endfor %}{% endset %}",
    "filter block": "{% filter upper %}{% for i in range(99999) %}{{ 'a' * 9000 }}"
    "{% endfor %}{% endfilter %}",
    # reach
    "class": "{{ ''.__class__.__mro__ }}",
    "append": "{% set l = [] %}{{ l.append(1) }}",
    "private attribute": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "private argument": "{% set ns = namespace(_x=1) %}",
    "include": "{% include '/etc/passwd' %}",
    "lorem ipsum": "{{ lipsum(n=100000) }}",
    "number's method": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "sum of lists": "{{ [[1]] | sum(start=[]) }}",
    # compiling
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "long sum": "{{ 1" + "+1" * 30_000 + " }}",
    "nested ifs": "{% if 1 %}" * 5000,
    "nested loops": "{% for a in [1] %}" * 50 + "{% endfor %}" * 50,
    "long number": "{{ " + "9" * 5000 + " }}",
    "long source": "x" * 200_000,
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_ends_soon_with_one_line(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with pytest.raises(TemplateError) as raised:
        ChatTemplate({"default": source}, {}, seconds=0.2).render([])
    assert "\n" not in str(raised.value)
    assert time.process_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB


def test_a_budget_cannot_be_earned_back() -> None:
    waste = "{% for i in range(99999) %}{% set x = 'a' * 1000 %}{% endfor %}"
    earn = "{% set x = [[1]] | map('-each', -10 ** 9) | first | list %}"
    with pytest.raises(TemplateError, match="too much text"):
        ChatTemplate({"default": earn + waste}, {}, seconds=60).render([])


def test_a_long_chat_is_not_a_hostile_one() -> None:
    source = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' ~ m['content'] | trim }}"
        "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
    )
    chat = [{"role": "user", "content": "word " * 800}] * 1000  # four million characters
    text = ChatTemplate({"default": source}, {}).render(chat)
    assert text == "\n".join(["<|user|>" + ("word " * 800).strip()] * 1000)


def test_the_deadline_is_looked_at_in_every_iteration() -> None:
    now = iter(range(1000))
    budget = Budget(10, clock=lambda: next(now))
    with pytest.raises(Exceeded, match="longer than 10 s"):
        for _ in range(100):
            budget.tick()
    assert next(now) == 12


def test_a_shared_value_weighs_as_often_as_it_would_print() -> None:
    budget = Budget(10)
    inner = ["abc"]
    assert budget.weigh(inner) == 5
    assert budget.weigh([inner, inner]) == 3 + 2 * 5
    assert budget.weigh({"k": inner}) == 1 + 2 + 1 + 5
    with pytest.raises(Exceeded, match="too large"):
        budget.take("a" * (MAX_VALUE + 1))


def test_renders_in_many_threads_have_budgets_of_their_own() -> None:
    quick = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    slow = ChatTemplate({"default": HOSTILE["nested ranges"]}, {}, seconds=0.1)
    outcomes: list[str] = []

    def run(template: ChatTemplate, text: str) -> None:
        try:
            outcomes.append(template.render([{"role": "user", "content": text}]))
        except TemplateError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=run, args=(quick, f"t{n}")) for n in range(8)]
    threads += [threading.Thread(target=run, args=(slow, "")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(outcomes)[:8] == [f"t{n}" for n in range(8)]
    assert all("longer than 0.1 s" in outcome for outcome in sorted(outcomes)[8:])
