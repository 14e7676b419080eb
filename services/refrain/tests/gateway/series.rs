//! Reads a page of metrics.

/// The sum of the series of a metric on a page that have these labels: `name{label="value"}`.
pub(crate) fn sum_of_series(page: &str, series: &str) -> f64 {
    let parts = |text: &str| {
        let (name, labels) = text.split_once('{').unwrap_or((text, ""));
        let labels = labels.trim_end_matches('}').split(',').map(str::to_owned);
        let labels: Vec<String> = labels.filter(|label| !label.is_empty()).collect();
        (name.to_owned(), labels)
    };
    let (name, wanted) = parts(series.trim());
    let values = page.lines().filter_map(|line| {
        let (of, value) = line.rsplit_once(' ')?;
        let (its_name, labels) = parts(of);
        let fits = its_name == name && wanted.iter().all(|label| labels.contains(label));
        fits.then(|| value.parse::<f64>().unwrap())
    });
    values.sum()
}
