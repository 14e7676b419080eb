// The type of a dashboard as JSON has it: the values of Grafana's enumerations are plain strings there.
import type { Dashboard, Panel, RowPanel } from "@grafana/schema";

type Plain<T> = T extends string
  ? `${T}`
  : T extends readonly unknown[] | object
    ? { [Key in keyof T]: Plain<T[Key]> }
    : T;

// A row has panels, and a panel has none. Without that, a row with wrong panels would pass as a panel of another type.
type Single = Plain<Panel> & { panels?: never };

type Row = Omit<Plain<RowPanel>, "panels"> & { panels: Single[] };

export type Board = Omit<Plain<Dashboard>, "panels"> & { panels: (Single | Row)[] };
