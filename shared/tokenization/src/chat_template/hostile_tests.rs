//! Templates that would make a gigabyte of a small chat.

use super::construct_tests::{CHAT, rendered};
use super::*;

#[test]
fn a_template_that_makes_far_too_much_is_refused_before_it_does() {
    let width = "1000000000";
    for source in [
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%.1000000000f' | format(1.5) }}",
        "{{ '%*d' | format(1000000000, 1) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:>1000000000}'.format('a') }}",
        "{{ '{:>{}}'.format('a', 1000000000) }}",
        "{{ '{:>{w}}'.format('a', w=1000000000) }}",
        "{{ 'a' | indent(1000000000, true) }}",
        "{{ 'a' | indent(width=1000000000, first=true) }}",
        "{% set a = ('a' * 9000) | replace('a', 'a' * 9000) %}{{ a | length }}",
        "{% set a = ('a' * 9000).replace('a', 'a' * 9000) %}{{ a | length }}",
        "{% set a = ('a' * 9000).replace('', 'a' * 9000) %}{{ a | length }}",
        "{% set a = range(9000) | join('a' * 9000) %}{{ a | length }}",
        "{% set a = range(9000) | join(d='a' * 9000) %}{{ a | length }}",
        "{% set a = ('a' * 9000).join(range(9000)) %}{{ a | length }}",
        "{% set a = (['a' * 9000] * 9000) | join %}{{ a | length }}",
        "{% set a = ('a' * 9000) | join('a' * 9000) %}{{ a | length }}",
        "{{ [1] | batch(1000000000, 0) | length }}",
        "{{ [1] | slice(1000000000) | length }}",
        "{% set a = 'a' * 999 %}{% set b = a * 999 %}{% set c = b ~ b ~ b ~ b %}{% set d = c ~ c ~ c ~ c %}\
         {% set e = d ~ d ~ d ~ d %}{% set f %}{{ e }}{{ e }}{% endset %}{{ f | length }}",
        // Each call is within the limit, and all of them together are not.
        "{% for i in range(100) %}{{ '%9000000d' | format(i) | length }}{% endfor %}",
    ] {
        let template = ChatTemplate::of_source(source).unwrap();
        let error = template.check().unwrap_err().to_string();
        let limit = VALUE_LENGTH_MAX.to_string();
        assert!(error.contains(&limit), "{source}: {error}");
        assert!(!error.contains(width), "{source}: {error}");
    }
}

#[test]
fn calls_within_the_limit_give_what_they_gave() {
    for (source, expected) in [
        (
            "{{ '%5d|%-3s|%.2f' | format(7, 'a', 1.5) }}",
            "    7|a  |1.50",
        ),
        ("{{ '%(a)4s' | format(a='x') }}", "   x"),
        ("{{ '{:>4}|{a:03d}'.format('x', a=7) }}", "   x|007"),
        (
            "{{ 'a\nb' | indent(2) }}|{{ 'a\nb' | indent(width=1, first=true) }}",
            "a\n  b| a\n b",
        ),
        (
            "{{ 'abab' | replace('a', 'xy') }} {{ 'abab'.replace('b', '', 1) }}",
            "xybxyb aab",
        ),
        (
            "{{ [1, 'b'] | join('-') }} {{ 'abc' | join('.') }} {{ ', '.join(['a', 'b']) }}",
            "1-b a.b.c a, b",
        ),
        (
            "{{ [{'a': 1}, {'a': 2}] | map(attribute='a') | join(d='+') }}",
            "1+2",
        ),
        (
            "{{ [{'a': 1}, {'a': 2}] | join(', ', attribute='a') }}",
            "1, 2",
        ),
        (
            "{{ [1, 2, 3] | batch(2, 0) | list }} {{ [1, 2, 3] | slice(2) | list }}",
            "[[1, 2], [3, 0]] [[1, 2], [3]]",
        ),
    ] {
        assert_eq!(rendered(source, CHAT), expected, "{source}");
    }
}
