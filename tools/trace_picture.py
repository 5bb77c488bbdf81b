#!/usr/bin/env python3
"""Draws a stretch of a trace as SVG, for documents: threads, op bodies, waits and dependency arrows; of a job
messages, the work on parts, and the arrows of requests.

  heddle trace run.trace -o run.json
  tools/trace_picture.py run.json --from-us 5000 --to-us 6000 -o run.svg

To look around in a trace, open the JSON in https://ui.perfetto.dev instead.
"""
import argparse
import json
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, TOP = 1300, 92, 16, 22
TRACK, GAP, LEGEND_ROW, LEGEND_COLUMN = 46, 44, 20, 170
COLOURS = ['#3b7dd8', '#d97a2b', '#3a9d5d', '#9063c8', '#c84b5c', '#2f9aa0', '#b08d1e', '#7d8a99',
           '#d26fae', '#5f6fd0', '#8a5a3c', '#6aa02e', '#1c4e8f', '#8f4312', '#1d6238', '#5b3590', '#8d2334',
           '#12686e', '#6f580b', '#4a5561', '#93376f', '#323f99', '#f0a35e', '#8fc46a']
WAIT = '#dcd6c8'


def load(path, begin, end):
    """The slices that overlap [begin, end), by thread, and the arrows between them."""
    with open(path, encoding='utf-8') as file:
        events = json.load(file)['traceEvents']
    slices, names, starts, arrows = {}, {}, {}, []
    processes = {e['pid']: e['args']['name'].split(' (')[0] for e in events
                 if e['ph'] == 'M' and e['name'] == 'process_name'}
    job = len(processes) > 1
    for event in events:
        if event['ph'] == 'M' and event['name'] == 'thread_name':
            names[event['tid']] = (f"{processes[event['pid']]}" if job else
                                   f"{event['args']['name']} {event['tid']}")
        elif job and event.get('cat') in ('wait', 'dependency'):
            continue
        elif event['ph'] == 'X' and event['ts'] < end and event['ts'] + event['dur'] > begin:
            if event['cat'] in ('message', 'part'):  # what happens, whatever the key
                event['name'] = event['name'].split(" '")[0]
            slices.setdefault(event['tid'], []).append(event)
        elif event['ph'] == 's':
            starts[event['id']] = event
        elif event['ph'] == 'f' and begin <= event['ts'] < end:
            start = starts.get(event['id'])
            if start is not None and start['ts'] >= begin:
                arrows.append((start['tid'], start['ts'], event['tid'], event['ts']))
    return slices, names, arrows


def draw(slices, names, arrows, begin, end):
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)
    at = lambda us: LEFT + (min(max(us, begin), end) - begin) * scale
    order = sorted(slices, key=lambda tid: (names.get(tid, ''), tid))
    tracks = {tid: TOP + i * (TRACK + GAP) for i, tid in enumerate(order)}
    kinds = sorted({e['name'] for es in slices.values() for e in es if e['cat'] != 'wait'})
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(kinds)}
    axis = TOP + len(tracks) * (TRACK + GAP) + 6
    columns = (WIDTH - LEFT - RIGHT) // LEGEND_COLUMN
    height = axis + 34 + ((len(kinds) + columns) // columns) * LEGEND_ROW + 10
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
           f'height="{height}" font-family="DejaVu Sans, Verdana, sans-serif" font-size="11">',
           f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>']
    box = lambda x, y, w, h, fill: out.append(
        f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{h}" fill="{fill}"/>')
    text = lambda x, y, s, more='': out.append(f'<text x="{x:.1f}" y="{y}"{more}>{escape(s)}</text>')
    for tid, y in tracks.items():
        text(LEFT - 8, y + TRACK / 2 + 4, names.get(tid, str(tid)), ' text-anchor="end"')
        box(LEFT, y, WIDTH - LEFT - RIGHT, TRACK, '#f5f3ee')
        # Waits lie behind, and what holds others.
        for event in sorted(slices[tid], key=lambda e: (e['cat'] != 'wait', -e['dur'])):
            x, x_end = at(event['ts']), at(event['ts'] + event['dur'])
            wait = event['cat'] == 'wait'
            outer = sum(e['ts'] <= event['ts'] and event['dur'] < e['dur'] and
                        event['ts'] + event['dur'] <= e['ts'] + e['dur'] for e in slices[tid] if e['cat'] != 'wait')
            inset = 0 if wait else 5 + 7 * min(outer, 2)
            box(x, y + inset, max(x_end - x, 0.6), TRACK - 2 * inset, WAIT if wait else colour[event['name']])
            if x_end - x > 7 * len(event['name']):
                text((x + x_end) / 2, y + TRACK / 2 + 4, event['name'],
                     f' text-anchor="middle" fill="{"#333" if wait else "#fff"}"')
    for from_tid, from_us, to_tid, to_us in arrows:
        x, x_to, y, y_to = at(from_us), at(to_us), tracks[from_tid] + TRACK - 5, tracks[to_tid] + 5
        if from_tid == to_tid:  # an arc below the track
            y_to, bend = y, y + min(GAP, 6 + (x_to - x) / 6)
        elif y > y_to:
            y, y_to = tracks[from_tid] + 5, tracks[to_tid] + TRACK - 5
            bend = (y + y_to) / 2
        else:
            bend = (y + y_to) / 2
        out.append(f'<path d="M{x:.1f} {y}C{x:.1f} {bend:.1f} {x_to:.1f} {bend:.1f} {x_to:.1f} {y_to}" '
                   'fill="none" stroke="#22303c" stroke-opacity=".25" stroke-width=".8"/>')
    for i in range(9):
        us = begin + (end - begin) * i / 8
        anchor = 'end' if i == 8 else 'middle' if i else 'start'
        text(at(us), axis + 6, f'{us - begin:.0f} us', f' text-anchor="{anchor}" fill="#5b6673"')
    for i, name in enumerate(kinds + ['(waiting)']):
        x = LEFT + i % columns * LEGEND_COLUMN
        y = axis + 24 + i // columns * LEGEND_ROW
        box(x, y, 12, 12, colour.get(name, WAIT))
        text(x + 18, y + 10, name)
    return '\n'.join(out + ['</svg>\n'])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('json', help='what `heddle trace` wrote')
    parser.add_argument('--from-us', type=float, default=0, help='begin, in us since the trace began')
    parser.add_argument('--to-us', type=float, required=True, help='end')
    parser.add_argument('-o', '--output', required=True, help='the SVG file')
    options = parser.parse_args()
    if options.to_us <= options.from_us:
        parser.error('--to-us: expected more than --from-us')
    slices, names, arrows = load(options.json, options.from_us, options.to_us)
    if not slices:
        parser.error(f'{options.json} has nothing between {options.from_us} and {options.to_us} us')
    with open(options.output, 'w', encoding='utf-8') as file:
        file.write(draw(slices, names, arrows, options.from_us, options.to_us))


if __name__ == '__main__':
    main()
