//! How long the values of a template may become.
//!
//! The engine counts instructions, and each of them may make a value twice as long. So a value that a template keeps
//! has a bound. Some calls make a long value of a short one: they pad a text to a width, replace, indent or join.
//! These find out first by how much their result is longer, and one rendering may lengthen its values by
//! [`GROWTH_MAX`] in all.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, StringInput, Value, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, filters};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Longest value that a template keeps: bytes of a text, entries of a list. It is the longest prompt.
pub(super) const VALUE_LENGTH_MAX: usize = 64 << 20;

/// Maximum number of bytes of texts, and entries of lists, by which one rendering may lengthen values: the longest
/// prompt.
const GROWTH_MAX: usize = VALUE_LENGTH_MAX;

/// Marks errors of values that are too long.
#[derive(Debug, thiserror::Error)]
#[error("too long")]
pub(super) struct TooLong;

/// Passes a value on that is not too long.
pub(super) fn bounded(value: Value) -> Result<Value, Error> {
    let length = match value.as_str() {
        Some(text) => text.len(),
        None => value.len().unwrap_or(0),
    };
    match length > VALUE_LENGTH_MAX {
        true => Err(too_long()),
        false => Ok(value),
    }
}

/// The error of a value that is too long.
fn too_long() -> Error {
    Error::new(ErrorKind::InvalidOperation, "too long").with_source(TooLong)
}

/// By how much a rendering has lengthened values.
#[derive(Default)]
struct Growth(usize);

/// Counts that a value becomes longer, unless that is too much.
fn grow(state: &mut State<'_, '_>, by: usize) -> Result<(), Error> {
    let Growth(grown) = state.get_or_insert_extension_with(Growth::default);
    *grown = grown.saturating_add(by);
    match *grown > GROWTH_MAX {
        true => Err(too_long()),
        false => Ok(()),
    }
}

/// Has the calls that lengthen values count by how much.
pub(super) fn bound(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(|state, value, method, arguments| {
        let by = match (value.as_str(), method, arguments) {
            (Some(text), "replace", [from, to, ..]) => {
                let [from, to] = [from, to].map(|text| text.as_str().unwrap_or_default());
                by_replacing(text, from, to)
            }
            (Some(text), "format", _) => by_formatting(FormatStyle::StrFormat, text, arguments),
            (Some(text), "join", [values]) => by_joining(values, text),
            _ => 0,
        };
        grow(state, by)?;
        unknown_method_callback(state, value, method, arguments)
    });
    environment.add_filter("replace", replace);
    environment.add_filter(
        "format",
        |state: &mut State<'_, '_>, text: StringInput<'_>, arguments: Rest<ValueOrKwargs>| {
            printf(state, text.as_str(), &arguments.into_values())
        },
    );
    environment.add_filter("indent", indent);
    environment.add_filter("join", join);
    environment.add_filter("batch", batch);
    environment.add_filter("slice", slice);
}

fn replace(
    state: &mut State<'_, '_>,
    text: StringInput<'_>,
    from: StringInput<'_>,
    to: StringInput<'_>,
) -> Result<Value, Error> {
    grow(
        state,
        by_replacing(text.as_str(), from.as_str(), to.as_str()),
    )?;
    filters::replace(state, text, from, to)
}

/// Formats a text as `%` does in Python.
pub(super) fn printf(
    state: &mut State<'_, '_>,
    text: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    grow(state, by_formatting(FormatStyle::Printf, text, arguments))?;
    format(FormatStyle::Printf, text, arguments).map(Value::from)
}

fn indent(
    state: &mut State<'_, '_>,
    text: StringInput<'_>,
    options: Rest<ValueOrKwargs>,
) -> Result<Value, Error> {
    let options = options.into_values();
    let (width, first, blank, named): (Option<usize>, Option<bool>, Option<bool>, Kwargs) =
        from_args(&options)?;
    let spaces = width.or(named.peek("width")?).unwrap_or(0);
    let lines = text.as_str().split('\n').count();
    grow(state, lines.saturating_mul(spaces))?;
    filters::indent(text, width, first, blank, named)
}

fn join(
    state: &mut State<'_, '_>,
    values: Value,
    joiner: Option<StringInput<'_>>,
    attribute: Option<&str>,
    named: Kwargs,
) -> Result<Value, Error> {
    // An iterator may give its values only once.
    let values = match values.kind() {
        ValueKind::Iterable => Value::from(values.try_iter()?.collect::<Vec<_>>()),
        _ => values,
    };
    let named_joiner: Option<Value> = named.peek("d")?;
    let named_joiner = named_joiner.as_ref().and_then(Value::as_str);
    let between = joiner.as_ref().map(StringInput::as_str).or(named_joiner);
    grow(state, by_joining(&values, between.unwrap_or_default()))?;
    filters::join(state, &values, joiner, attribute, named)
}

fn batch(
    state: &mut State<'_, '_>,
    values: Value,
    count: usize,
    fill: Option<Value>,
) -> Result<Value, Error> {
    grow(state, fill.as_ref().map_or(0, |_| count))?;
    filters::batch(state, values, count, fill)
}

fn slice(
    state: &mut State<'_, '_>,
    values: Value,
    count: usize,
    fill: Option<Value>,
) -> Result<Value, Error> {
    grow(state, count)?;
    filters::slice(state, values, count, fill)
}

fn by_replacing(text: &str, from: &str, to: &str) -> usize {
    let longer = to.len().saturating_sub(from.len());
    match longer {
        0 => 0,
        _ => text.matches(from).count().saturating_mul(longer),
    }
}

/// At most the sum of all texts, since one text may be joined many times.
fn by_joining(values: &Value, between: &str) -> usize {
    if values.as_str().is_some() {
        let characters = values.len().unwrap_or(0);
        return characters.saturating_mul(between.len());
    }
    let lengths = values.try_iter().into_iter().flatten();
    let lengths = lengths.map(|value| value.as_str().map_or(0, str::len) + between.len());
    lengths.fold(0, usize::saturating_add)
}

/// The sum of the widths and precisions in a text with places for arguments. One that is itself an argument counts as
/// the largest of them.
fn by_formatting(style: FormatStyle, text: &str, arguments: &[Value]) -> usize {
    let mut sum = 0usize;
    let mut add = |spec: &str, holes: &[char]| {
        for number in spec.split(|character: char| !character.is_ascii_digit()) {
            let width = match number {
                "" => 0,
                // More digits than a number has is more than anything may have.
                digits => digits.parse().unwrap_or(usize::MAX),
            };
            sum = sum.saturating_add(width);
        }
        for _ in spec.matches(holes) {
            sum = sum.saturating_add(largest(arguments));
        }
    };
    match style {
        FormatStyle::Printf => {
            for spec in text.split('%').skip(1) {
                // `%(name)s` has the name of an argument in front.
                let named = spec.strip_prefix('(').and_then(|spec| spec.split_once(')'));
                let spec = named.map_or(spec, |(_, spec)| spec);
                let end = spec.find(|character: char| !"#0123456789-+ .*".contains(character));
                add(&spec[..end.unwrap_or(spec.len())], &['*']);
            }
        }
        _ => {
            let (mut depth, mut spec) = (0usize, None::<String>);
            let mut characters = text.chars().peekable();
            while let Some(character) = characters.next() {
                match character {
                    // Outside of places a double bracket is text.
                    '{' if depth == 0 && characters.next_if_eq(&'{').is_some() => {}
                    '{' if depth > 0 => {
                        depth += 1;
                        add("*", &['*']);
                    }
                    '{' => (depth, spec) = (1, None),
                    '}' => {
                        depth = depth.saturating_sub(1);
                        if depth == 0 {
                            add(&spec.take().unwrap_or_default(), &[]);
                        }
                    }
                    ':' if depth == 1 && spec.is_none() => spec = Some(String::new()),
                    _ if depth == 1 => spec.iter_mut().for_each(|spec| spec.push(character)),
                    _ => {}
                }
            }
        }
    }
    sum
}

/// The largest whole number among arguments, those with a name included.
fn largest(arguments: &[Value]) -> usize {
    let named = arguments.iter().filter(|value| value.is_kwargs());
    let named = named.flat_map(|named| {
        let names = named.try_iter().into_iter().flatten();
        names.filter_map(|name| named.get_item(&name).ok())
    });
    let all = arguments.iter().cloned().chain(named);
    all.filter_map(|value| value.as_usize()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_widths_of_a_format_are_summed_and_nothing_else_is() {
        use FormatStyle::{Printf, StrFormat};
        let of = |style, text: &str| by_formatting(style, text, &[Value::from(70)]);
        for (style, text, by) in [
            (Printf, "%5d and %-12s, 99 of 1000", 17),
            (Printf, "%(a1)7s %.3f %%", 10),
            (Printf, "%*d", 70),
            (Printf, "%99999999999999999999999d", usize::MAX),
            (StrFormat, "{:>7} {0} {a:05.2f} 99", 14),
            (StrFormat, "{:{}} 8", 70),
            (StrFormat, "{a:5{w}}", 75),
            (StrFormat, "{{:99}} {{{:7}}}", 7),
            (StrFormat, "a: 12 {}", 0),
        ] {
            assert_eq!(of(style, text), by, "{text}");
        }
    }
}
