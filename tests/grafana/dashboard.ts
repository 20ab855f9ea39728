// What dashboard.schema.json was generated from: Grafana's own types of a dashboard, with the options and fields of just
// those kinds of panels that ours have. Anew, for another version of Grafana, in an empty directory:
//
//   npm install @grafana/schema@13.2.3 ts-json-schema-generator@2.4.0
//   npx ts-json-schema-generator --path dashboard.ts --type Board --no-type-check --minify > dashboard.schema.json
//
// and then, for its size, without the descriptions and with a line for each definition. Queries are not in it (the package has none of Prometheus): a test asks them.
import type { Dashboard, Panel, FieldConfigSource, FieldConfig, AnnotationQuery } from './node_modules/@grafana/schema/dist/types/raw/dashboard/x/types.gen';
import type * as timeseries from './node_modules/@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/types.gen';
import type * as stat from './node_modules/@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/types.gen';
import type * as table from './node_modules/@grafana/schema/dist/types/raw/composable/table/panelcfg/x/types.gen';
import type * as heatmap from './node_modules/@grafana/schema/dist/types/raw/composable/heatmap/panelcfg/x/types.gen';
import type * as bargauge from './node_modules/@grafana/schema/dist/types/raw/composable/bargauge/panelcfg/x/types.gen';
import type * as statetimeline from './node_modules/@grafana/schema/dist/types/raw/composable/statetimeline/panelcfg/x/types.gen';

// each kind of panel calls its own `Options` and `FieldConfig`: without their names they do not clash
type Plain<Type> = { [Key in keyof Type]: Type[Key] };
type Fields<Custom> = Omit<FieldConfigSource, 'defaults'> & { defaults: Omit<FieldConfig, 'custom'> & { custom?: Plain<Custom> } };
type Of<Type extends string, Options, Custom> = Omit<Panel, 'type' | 'options' | 'fieldConfig' | 'libraryPanel'> & {
  type: Type;
  options: Plain<Options>;
  fieldConfig: Fields<Custom>;
};
export type timeseriesPanel = Of<'timeseries', timeseries.Options, timeseries.FieldConfig>;
export type statPanel = Of<'stat', stat.Options, {}>;
export type tablePanel = Of<'table', table.Options, table.FieldConfig>;
export type heatmapPanel = Of<'heatmap', heatmap.Options, heatmap.FieldConfig>;
export type bargaugePanel = Of<'bargauge', bargauge.Options, {}>;
export type statetimelinePanel = Of<'state-timeline', statetimeline.Options, statetimeline.FieldConfig>;
// the raw type has the target of Grafana's own data source; the rest are the fields of Prometheus's annotations
type Annotation = Omit<AnnotationQuery, 'target'> & {
  target: Record<string, unknown>;
  titleFormat?: string;
  textFormat?: string;
  tagKeys?: string;
};
export type Board = Omit<Dashboard, 'panels' | 'annotations' | 'snapshot'> & {
  panels: (timeseriesPanel | statPanel | tablePanel | heatmapPanel | bargaugePanel | statetimelinePanel)[];
  annotations: { list: Annotation[] };
};
