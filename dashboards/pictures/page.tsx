// Draws a dashboard's panels with Grafana's components from the answers of a Prometheus (window.dashboard, see render.py).
// Panels that are not in @grafana/ui (heatmap, state timeline) need plugins of Grafana: render.py leaves them out.
import {
  createTheme, DataFrame, EventBusSrv, Field, FieldType, getDisplayProcessor, standardTransformers, standardTransformersRegistry,
  ThemeContext, toDataFrame, transformDataFrame,
} from '@grafana/data';
import { BarGauge, BigValue, GlobalStyles, PanelChrome, PanelContextProvider, TimeSeries } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import React from 'react';
import { createRoot } from 'react-dom/client';
import { firstValueFrom } from 'rxjs';

type Series = { refId: string; labels: Record<string, string>; times: number[]; values: number[]; step: number };
type Drawn = { panel: any; series: Series[]; frames: DataFrame[] };
const { dashboard, shown, width, mode, from, to } = (window as any).dashboard;

const CELL = width / 24;
const LINE = 38; // pixels of a line of Grafana's grid
const GAP = 8;
const theme = createTheme({ colors: { mode } });
const range: any = { from: { valueOf: () => from }, to: { valueOf: () => to }, raw: { from, to } };

standardTransformersRegistry.setInit(() =>
  [standardTransformers.mergeTransformer, standardTransformers.organizeFieldsTransformer].map((transformation: any) => ({
    id: transformation.id, name: transformation.id, aliasIds: [], editor: () => null,
    transformation: () => Promise.resolve(transformation),
  })) as any
);

const legend = (format: string, labels: Record<string, string>) =>
  format.replace(/{{(\w+)}}/g, (_: string, name: string) => labels[name] ?? '');

// applies the panel's defaults and the overrides for this name to a field, as Grafana does
function configured(panel: any, field: Field, name: string): Field {
  const { defaults, overrides } = panel.fieldConfig;
  const config: any = { ...field.config, ...defaults, custom: { ...defaults.custom } };
  for (const { matcher, properties } of overrides) {
    for (const { id, value } of matcher.options === name ? properties : []) {
      id.startsWith('custom.') ? (config.custom[id.slice(7)] = value) : (config[id] = value);
    }
  }
  config.displayName = name;
  config.links = undefined;
  const shown: Field = { ...field, config };
  shown.display = getDisplayProcessor({ field: shown, theme });
  shown.state = { displayName: name } as any;
  return shown;
}

// breaks a line at a missing sample, as Grafana does
function withBreaks({ times, values, step }: Series): { times: number[]; values: Array<number | null> } {
  const line = { times: [] as number[], values: [] as Array<number | null> };
  times.forEach((time, index) => {
    if (index && time - times[index - 1] > 1.5 * step) {
      line.times.push(times[index - 1] + step);
      line.values.push(null);
    }
    line.times.push(time);
    line.values.push(values[index]);
  });
  return line;
}

function overTime(panel: any, allSeries: Series[]): DataFrame[] {
  return allSeries.map((series, index) => {
    const target = panel.targets.find((target: any) => target.refId === series.refId);
    const { times, values } = withBreaks(series);
    const frame = toDataFrame({
      refId: series.refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: times, config: {} },
        { name: 'Value', type: FieldType.number, values, config: {}, labels: series.labels },
      ],
    });
    const value = configured(panel, frame.fields[1], legend(target.legendFormat ?? '', series.labels) || panel.title);
    value.config.custom = {
      drawStyle: 'line', axisPlacement: 'auto', scaleDistribution: { type: 'linear' }, pointSize: 5,
      hideFrom: { legend: false, tooltip: false, viz: false }, ...value.config.custom,
    };
    value.config.color ??= { mode: 'palette-classic' };
    value.state = { ...value.state, seriesIndex: index } as any;
    value.display = getDisplayProcessor({ field: value, theme });
    return { ...frame, fields: [frame.fields[0], value] };
  });
}

async function asTable(panel: any, allSeries: Series[]): Promise<DataFrame[]> {
  const hasSeries = (ref: string) => allSeries.some((series) => series.refId === ref);
  const refs = panel.targets.map((target: any) => target.refId).filter(hasSeries);
  const frames = refs.map((ref: string) => {
    const rows = allSeries.filter((series) => series.refId === ref);
    const labels = [...new Set(rows.flatMap((row) => Object.keys(row.labels)))].sort();
    const valueName = refs.length > 1 ? `Value #${ref}` : 'Value';
    return toDataFrame({
      refId: ref,
      fields: [
        { name: 'Time', type: FieldType.time, values: rows.map((row) => row.times[0]), config: {} },
        ...labels.map((name) => ({ name, type: FieldType.string, values: rows.map((row) => row.labels[name]), config: {} })),
        { name: valueName, type: FieldType.number, values: rows.map((row) => row.values[0]), config: {} },
      ],
    });
  });
  const [frame] = await firstValueFrom(transformDataFrame(panel.transformations, frames));
  if (!frame) {
    return [];
  }
  return [{ ...frame, fields: frame.fields.map((field) => configured(panel, field, field.config.displayName ?? field.name)) }];
}

function Inside({ panel, frames, width, height }: Drawn & { width: number; height: number }) {
  const values = frames.map(({ fields: [, field] }) => field.display!(field.values[field.values.length - 1]));
  if (!frames.length) {
    return <div style={{ padding: 16, opacity: 0.6 }}>{panel.fieldConfig.defaults.noValue ?? 'No data'}</div>;
  }
  if (panel.type === 'stat') {
    return <BigValue theme={theme} value={{ ...values[0], title: undefined }} width={width} height={height} {...panel.options} />;
  }
  if (panel.type === 'bargauge') {
    const barHeight = Math.min(height / frames.length, 42);
    const top = Math.max(...values.map((value) => value.numeric), 1);
    return frames.map(({ fields: [, field] }, index) => (
      <BarGauge key={index} theme={theme} width={width} height={barHeight} {...panel.options} itemSpacing={4}
        value={{ ...values[index], title: field.config.displayName }} display={field.display}
        field={{ ...field.config, min: 0, max: top }} />
    ));
  }
  if (panel.type === 'table') {
    return <TableNG data={frames[0]} width={width} height={height} {...panel.options} />;
  }
  return (
    <TimeSeries frames={frames} timeRange={range} timeZone="utc" width={width} height={height} {...panel.options} structureRev={1}>
      {() => null}
    </TimeSeries>
  );
}

function Board({ drawn }: { drawn: Drawn[] }) {
  const height = Math.max(...drawn.map(({ panel: { gridPos } }) => gridPos.y + gridPos.h)) * LINE;
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <PanelContextProvider value={{ eventsScope: 'x', eventBus: new EventBusSrv() } as any}>
        <div style={{ position: 'relative', width, height, background: theme.colors.background.canvas }}>
          {drawn.map((item) => {
            const { x, y, w, h } = item.panel.gridPos;
            return (
              <div key={item.panel.id} style={{ position: 'absolute', left: x * CELL + GAP / 2, top: y * LINE + GAP / 2 }}>
                <PanelChrome title={item.panel.title} width={w * CELL - GAP} height={h * LINE - GAP}>
                  {(width, height) => <Inside {...item} width={width} height={height} />}
                </PanelChrome>
              </div>
            );
          })}
        </div>
      </PanelContextProvider>
    </ThemeContext.Provider>
  );
}

async function draw() {
  const drawn: Drawn[] = [];
  for (const panel of dashboard.panels) {
    const series: Series[] = shown[panel.id];
    const frames = panel.type === 'table' ? await asTable(panel, series) : overTime(panel, series);
    drawn.push({ panel, series, frames });
  }
  createRoot(document.getElementById('board')!).render(<Board drawn={drawn} />);
}
draw();
