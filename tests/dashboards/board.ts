// The type of a dashboard as JSON has it: the values of Grafana's enumerations are plain strings there.
import type { Dashboard } from "@grafana/schema";

type Plain<T> = T extends string
  ? `${T}`
  : T extends readonly unknown[] | object
    ? { [Key in keyof T]: Plain<T[Key]> }
    : T;

export type Board = Plain<Dashboard>;
