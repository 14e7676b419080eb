// Writes numbers for people.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const two = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

// Shown where there is no figure.
export const NONE = "–";

const isMissing = (value) => value === null || value === undefined || !Number.isFinite(value);

// A count, with all of its digits.
export function count(value) {
  return isMissing(value) ? NONE : whole.format(value);
}

// A number with about three digits.
export function short(value) {
  if (isMissing(value)) return NONE;
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) {
      const scaled = value / (unit === "k" ? 1e3 : size);
      return (scaled < 100 ? one : whole).format(scaled) + unit;
    }
  }
  return value >= 100 || value === 0 ? whole.format(value) : value >= 10 ? one.format(value) : two.format(value);
}

export function bytes(value) {
  if (isMissing(value)) return NONE;
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return `${one.format(value / size)} ${unit}`;
  }
  return `${whole.format(value)} B`;
}

export function percent(value) {
  return isMissing(value) ? NONE : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

// A quotient, such as 1.53×.
export function times(value) {
  return isMissing(value) ? NONE : `${two.format(value)}×`;
}

export function seconds(value) {
  if (isMissing(value)) return NONE;
  if (value < 0.0995) return `${(1000 * value).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 9.95 ? 2 : 0)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
}

// The time of a day.
export function clock(ms) {
  return new Date(ms).toLocaleTimeString("en-GB");
}

export function dateAndTime(ms) {
  return `${new Date(ms).toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

// "1 worker", "2 workers".
export function many(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
