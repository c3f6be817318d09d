// The redline view. Runs once for each component, in a function of Gradio's with the arguments
// (element, trigger, props, server, upload, watch); STYLE, the style sheet, stands before it.
// props.value is an append-only string, one JSON array a line:
//   ["u", text]                      a turn of the person's
//   ["s", key, temperature, note]    a reply starts
//   ["r", index, K, tokens]          a round; a token is [code, text, monospaced?, label?]
//   ["e", visible, reason, tail, error]  the reply ends
// Everything that a model or a person wrote enters the page as a text node, and in no other way.

const FATES = { a: 'accepted', r: 'rejected', d: 'discarded', s: 'resampled', b: 'bonus', p: 'plain',
  o: 'discarded' };  // o: in a branch of a tree, beside what was written
const KEPT = 'asbp';
const LEGEND = [
  ['a', 'kept'], ['r', 'struck out'], ['s', 'put in its place'], ['b', 'free extra'], ['d', 'never tested'],
];
const ENDINGS = { length: 'The length limit was reached.', cancelled: 'Stopped.', error: 'Ended by an error.',
  interrupted: 'The record ends here.' };
const HOVER_MS = 80, LEAVE_MS = 180;
const SIGNS = { '\n': '↵', '\t': '⇥', '\x7f': '␡' };
// Choices outlive the component (the page may mount it anew), not the page.
const choices = (window.redlineChoices ??= { rejected: true, discarded: true, rounds: true, branches: false });
const serial = (window.redlineSerial = (window.redlineSerial ?? 0) + 1);

if (!document.getElementById('redline-style')) {
  const style = make('style', '', STYLE);
  style.id = 'redline-style';
  document.head.append(style);
}

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}
function sample(fate) {
  const node = make('span', `rl-t rl-${fate}`);
  node.append(make('span', 'rl-ink', fate));
  return node;
}
// A control character as a visible sign; any other text as it is.
const sign = (text) => SIGNS[text] ?? (text.length === 1 && text < ' ' ? String.fromCharCode(0x2400 + text.charCodeAt(0)) : text);
const length = (text) => { let n = 0; for (const _ of text) n++; return n; };  // characters as Python counts them

// ---------------------------------------------------------------- the frame

const root = element.querySelector('.rl');
const legend = make('div', 'rl-legend'), view = make('div', 'rl-view'), card = make('div', 'rl-card');
root.replaceChildren(legend, view, card);
view.setAttribute('role', 'listbox');
view.setAttribute('aria-label', 'Replies, token by token');
card.id = `rl-card-${serial}`;
card.hidden = true;
if (card.showPopover) card.popover = 'manual';  // the top layer: no ancestor can clip or cover it

for (const [code, meaning] of LEGEND) {
  const entry = make('span', 'rl-entry');
  entry.append(sample(FATES[code]), ` ${meaning}`);
  legend.append(entry);
}
const switches = make('div', 'rl-switches');
switches.setAttribute('role', 'group');
switches.setAttribute('aria-label', 'Show');
switches.append('show');
legend.append(switches);
// Branches are candidates of trees that were never tested: text that stands beside the reply, not in it.
for (const what of ['rejected', 'discarded', 'rounds', 'branches']) {
  const button = make('button', 'rl-switch', what);
  button.type = 'button';
  button.setAttribute('aria-label', `Show ${what}`);
  button.addEventListener('click', () => { choices[what] = !choices[what]; applyChoices(); });
  switches.append(button);
}
const branches = switches.lastChild;
branches.hidden = true;
function applyChoices() {
  for (const button of switches.children) button.setAttribute('aria-pressed', String(choices[button.textContent]));
  root.classList.toggle('rl-hide-rejected', !choices.rejected);
  root.classList.toggle('rl-hide-discarded', !choices.discarded);
  root.classList.toggle('rl-hide-branches', !choices.branches);
  root.classList.toggle('rl-rounds', choices.rounds);
  if (current >= 0 && !shown(current)) close();
}

// ---------------------------------------------------------------- drawing

let seen = '';     // the lines already drawn
let tokens = [];   // {el, fate, text, label, reply, i, round}, in the order shown
let rounds = [];   // {segments, start, index, k, single, ticked}: start is the place of its first token in tokens
let reply = null;  // the reply being drawn

function draw() {
  const value = props.value || '';
  const end = value.lastIndexOf('\n') + 1;
  if (!value.startsWith(seen)) reset();
  for (const line of value.slice(seen.length, end).split('\n')) if (line) add(JSON.parse(line));
  seen = value.slice(0, end);
  legend.hidden = !tokens.length;
  view.tabIndex = tokens.length ? 0 : -1;
}

function reset() {
  close();
  view.replaceChildren();
  seen = ''; tokens = []; rounds = []; reply = null; current = -1;
  lit = null;
  branches.hidden = true;
}

function add(record) {
  if (record[0] === 'u') addUser(record[1]);
  else if (record[0] === 's') startReply(record[1], record[3]);
  else if (record[0] === 'r' && reply) addRound(record[1], record[2], record[3]);
  else if (record[0] === 'e' && reply) endReply(record[1], record[2], record[3], record[4]);
}

function group(className, label) {
  const node = make('div', className);
  node.setAttribute('role', 'group');
  node.setAttribute('aria-label', label);
  view.append(node);
  return node;
}

function addUser(text) {
  const said = make('div', '', text);
  said.setAttribute('role', 'option');
  said.setAttribute('aria-disabled', 'true');
  group('rl-user', 'You').append(said);
}

function startReply(key, note) {
  const node = group('rl-reply', 'Reply');
  if (note) node.append(make('div', 'rl-note', note));
  const body = make('div', 'rl-text');
  node.append(body);
  // run: the segments of the monospaced run at the end, and the block they became once it spanned lines;
  // last: the kept text before; afterBlock: whether a block has ended since
  reply = { key, node, body, count: 0, start: tokens.length, monospaced: false, run: null, segment: null, afterBlock: false, last: '' };
}

function addRound(index, k, list) {
  const single = list.length === 1;
  // Between rounds of one token each a tick would stand at every token and group nothing.
  const ticked = !single || (reply.count > 0 && !rounds.at(-1).single);
  const round = { segments: [], start: tokens.length, index, k, single, ticked };
  rounds.push(round);
  reply.segment = null;
  // Discarded drafts come last, so that a rejected one stands beside the token that replaced it.
  const order = [...list.keys()].sort((a, b) => 'do'.includes(list[a][0]) - 'do'.includes(list[b][0]));
  // A rejected draft stands where its replacement stands; the kept tokens decide where code begins and ends.
  let next;
  const where = new Array(order.length);
  for (let at = order.length - 1; at >= 0; at--) {
    const [code, , monospaced] = list[order[at]];
    if (KEPT.includes(code)) next = !!monospaced;
    where[at] = next;
  }
  order.forEach((i, at) => addToken(round, reply.count + i, list[i], where[at] ?? reply.monospaced));
  reply.count += list.length;
}

function addToken(round, i, [code, text, monospaced, label], inCode) {
  const el = make('span', `rl-t rl-${FATES[code]}`), kept = KEPT.includes(code);
  if (code !== 'p') el.classList.add('rl-coloured');
  if (code === 'o') { el.classList.add('rl-branch'); branches.hidden = false; }
  if (monospaced) el.classList.add('rl-mono');
  el.setAttribute('role', 'option');
  el.place = tokens.length;
  if (text) fill(el, text, kept);
  else el.append(make('span', 'rl-chip', label || '∅'));
  tokens.push({ el, code, fate: FATES[code], text, label, reply, i, round });
  segmentFor(round, inCode).append(el);
  if (!kept) return;
  if (inCode && text.includes('\n')) blockUp();
  // The first line break after a code block that ends without one: the block itself has broken the line.
  if (reply.afterBlock && text.startsWith('\n') && !reply.last.endsWith('\n')) el.firstChild.classList.add('rl-broken');
  reply.afterBlock = false;
  reply.last = text;
}

// Kept text stands exactly as it is; what was not kept may break no line, so its controls become signs.
// The ink carries the marks of a token's fate: not its leading spaces, for a struck space at the end of a line
// looks like a hyphen, unless spaces are all there is.
function fill(el, text, kept) {
  for (const part of text.split(kept ? /(\n)/ : /([\x00-\x1f\x7f])/)) {
    if (!part) continue;
    if (kept && part === '\n') el.append(make('span', 'rl-nl', part));
    else if (!kept && sign(part) !== part) el.append(make('span', 'rl-sign', sign(part)));
    else {
      const spaces = part.trim() ? part.length - part.trimStart().length : 0;
      el.append(part.slice(0, spaces), make('span', 'rl-ink', part.slice(spaces)));
    }
  }
}

// A segment is what one round wrote into one place: prose, or one run of code.
function segmentFor(round, inCode) {
  if (reply.segment && reply.monospaced === inCode) return reply.segment;
  const segment = make('span', 'rl-seg');
  if (!round.segments.length && round.ticked) segment.classList.add('rl-first');
  round.segments.push(segment);
  if (inCode && !reply.monospaced) reply.run = { segments: [], block: null };
  if (!inCode) {
    reply.afterBlock ||= !!reply.run?.block;
    reply.run = null;
  }
  if (reply.run) reply.run.segments.push(segment);
  (reply.run?.block ?? reply.body).append(segment);
  reply.monospaced = inCode;
  return (reply.segment = segment);
}

function blockUp() {
  if (reply.run.block) return;
  reply.run.block = make('div', 'rl-code');
  reply.body.insertBefore(reply.run.block, reply.run.segments[0]);
  reply.run.block.append(...reply.run.segments);
}

function endReply(visible, reason, tail, error) {
  let hidden = false, count = 0;
  if (visible !== null) {
    for (const token of tokens.slice(reply.start)) {
      if (!KEPT.includes(token.code)) continue;
      const begin = count;
      count += length(token.text);
      if (count <= visible) continue;
      hidden = true;
      if (begin >= visible) { token.el.classList.add('rl-beyond'); continue; }
      const characters = Array.from(token.text), rest = make('span', 'rl-beyond');
      token.el.replaceChildren();
      fill(token.el, characters.slice(0, visible - begin).join(''), true);
      fill(rest, characters.slice(visible - begin).join(''), true);
      token.el.append(rest);
    }
  }
  if (tail) reply.body.append(make('span', 'rl-tail', tail));
  let note = error || ENDINGS[reason] || '';
  if (reason === 'stop_string') note = 'A stop string was reached.';
  if (hidden) note += `${note ? ' ' : ''}The faint text at the end was written but is no part of the reply.`;
  if (note) reply.node.append(make('div', 'rl-end', note));
  reply = null;
}

// ---------------------------------------------------------------- following the end

// Stays with the end of the text while the reader is there; scrolling up lets go, coming back takes hold again.
// scroll-padding-bottom of the scrolling box tells of anything that covers its lower edge.
let atEnd = true, lastTop = 0;
function scroller() {
  for (let node = root.parentElement; node && node !== document.body; node = node.parentElement) {
    if (/auto|scroll/.test(getComputedStyle(node).overflowY) && node.scrollHeight > node.clientHeight) return node;
  }
  return document.scrollingElement;
}
function beyondEnd(box) {
  const bottom = box === document.scrollingElement ? innerHeight : box.getBoundingClientRect().bottom;
  return root.getBoundingClientRect().bottom - bottom + (parseFloat(getComputedStyle(box).scrollPaddingBottom) || 0);
}
function follow() {
  const box = scroller();
  if (atEnd && root.getClientRects().length) box.scrollTop += Math.max(0, beyondEnd(box));
}
function onScroll(box) {
  if (!root.getClientRects().length) return;
  // Only upward: while text streams in, a scroll of follow's own may be reported after the end has moved on.
  if (beyondEnd(box) < 48) atEnd = true;
  else if (box.scrollTop < lastTop) atEnd = false;
  lastTop = box.scrollTop;
}
new ResizeObserver(follow).observe(root);

// ---------------------------------------------------------------- the card

let current = -1, pinned = false, byPointer = false, timer = 0, lit = null;
const known = new Map();  // answers already fetched

const shown = (place) => tokens[place].el.getClientRects().length > 0;

function light(round) {
  if (lit === round) return;
  for (const segment of lit?.segments ?? []) segment.classList.remove('rl-lit');
  for (const segment of round?.segments ?? []) segment.classList.add('rl-lit');
  lit = round;
}

function setCurrent(place) {
  const before = tokens[current]?.el;
  if (before) { before.classList.remove('rl-current'); before.removeAttribute('aria-selected'); before.removeAttribute('id'); before.removeAttribute('aria-description'); }
  current = place;
  const token = tokens[place];
  if (!token) { view.removeAttribute('aria-activedescendant'); return; }
  token.el.classList.add('rl-current');
  token.el.id = `rl-${serial}-current`;
  token.el.setAttribute('aria-selected', 'true');
  token.el.setAttribute('aria-description', token.fate);
  view.setAttribute('aria-activedescendant', token.el.id);
  light(token.round);
}

async function open(place, pointer) {
  clearTimeout(timer);
  byPointer = pointer;
  setCurrent(place);
  const token = tokens[place], key = `${token.reply.key}\n${token.i}`;
  let details = known.get(key);
  if (!details) {
    details = await server.fetch_details(token.reply.key, token.i).catch(() => null);
    if (details?.sentence) known.set(key, details);
  }
  if (tokens[current] === token) showCard(token, details);
}

// A text on one line in which every space and control character can be seen.
function word(text, label) {
  const node = make('span', 'rl-word');
  if (!text) node.append(label || '∅');
  for (const part of text.split(/([\x00-\x20\x7f])/)) {
    if (!part) continue;
    const seen = part === ' ' ? '·' : sign(part);
    node.append(seen === part ? part : make('span', 'rl-space', seen));
  }
  return node;
}

function topList(className, title, entries) {
  const column = make('div', className), list = make('ol');
  column.append(make('h4', '', title));
  if (!entries.length) column.append('–');
  for (const [text, probability, written, isThis] of entries) {
    const item = make('li', isThis ? 'rl-this' : ''), bar = make('div', 'rl-bar'), fillNode = make('i');
    fillNode.style.width = `${100 * Math.min(1, Number(probability))}%`;
    bar.append(fillNode);
    item.append(word(text), make('span', 'rl-value', written), bar);
    list.append(item);
  }
  column.append(list);
  return column;
}

// What else a tree proposed for a token's place.
function siblings(others) {
  const list = make('ul', 'rl-siblings');
  for (const [name, fate, p, q] of others) list.append(make('li', '', `${name} ${fate}, p ${p}, q ${q}`));
  const column = make('div', 'rl-others');
  column.append(make('h4', '', 'Other candidates here'), list);
  return column;
}

function showCard(token, details) {
  const head = make('div', 'rl-head'), closer = make('button', 'rl-close', '×');
  closer.type = 'button';
  closer.tabIndex = -1;
  closer.setAttribute('aria-label', 'Close');
  closer.addEventListener('click', () => { close(); });
  head.append(word(token.text, token.label), sample(token.fate), closer);
  const parts = [head];
  if (details?.sentence) {
    const figures = make('dl', 'rl-figures');
    for (const [name, value, meaning] of details.figures) {
      const pair = make('div');
      pair.title = meaning;
      pair.append(make('dt', '', name), make('dd', '', value));
      figures.append(pair);
    }
    const tops = make('div', 'rl-tops');
    tops.append(topList('rl-target', details.titles[0], details.top_p), topList('rl-draft', details.titles[1], details.top_q));
    parts.push(make('p', 'rl-why', details.sentence), make('p', 'rl-round', details.round), figures, tops);
    if (details.siblings?.length) parts.push(siblings(details.siblings));
  } else {
    parts.push(make('p', 'rl-why', 'The figures of this token are not at hand.'));
  }
  card.replaceChildren(...parts);
  card.setAttribute('role', pinned ? 'dialog' : 'tooltip');
  card.setAttribute('aria-label', 'Why this token stands here');
  view.setAttribute('aria-describedby', card.id);
  card.hidden = false;
  if (card.popover && !card.matches(':popover-open')) card.showPopover();
  card.scrollTop = 0;
  placeCard(token);
  // A sheet must not cover the token it speaks of.
  if (card.offsetWidth >= innerWidth) scroller().scrollTop += Math.max(0, token.el.getBoundingClientRect().bottom + 12 - card.getBoundingClientRect().top);
}

// Below the token where there is room, else above; never outside the window. (Narrow windows: a sheet, by style.)
function placeCard(token) {
  const gap = 8, box = token.el.getClientRects()[0];
  if (!box) return;
  const below = innerHeight - box.bottom - 2 * gap, above = box.top - 2 * gap;
  card.style.maxHeight = '';
  const under = below >= Math.min(card.offsetHeight, above) || below >= above;
  card.style.maxHeight = `${Math.max(120, under ? below : above)}px`;
  const top = under ? box.bottom + gap : box.top - gap - card.offsetHeight;
  card.style.top = `${Math.max(gap, Math.min(top, innerHeight - card.offsetHeight - gap))}px`;
  card.style.left = `${Math.max(gap, Math.min(box.left - 12, document.documentElement.clientWidth - card.offsetWidth - gap))}px`;
}

function hideCard() {
  clearTimeout(timer);
  pinned = false;
  if (card.popover && card.matches(':popover-open')) card.hidePopover();
  card.hidden = true;
  view.removeAttribute('aria-describedby');
}
function close() {
  hideCard();
  setCurrent(-1);
  light(null);
}
function pin() {
  pinned = true;
  card.setAttribute('role', 'dialog');
}

// ---------------------------------------------------------------- pointer and keys

const tokenAt = (event) => event.target.closest?.('.rl-view .rl-t')?.place ?? -1;

view.addEventListener('pointerover', (event) => {
  if (event.pointerType === 'touch') return;
  const place = tokenAt(event);
  if (place < 0 || pinned) return;
  light(tokens[place].round);
  clearTimeout(timer);
  if (place !== current || card.hidden) timer = setTimeout(() => open(place, true), HOVER_MS);
});
function leave(event) {
  if (event.pointerType === 'touch' || pinned) return;
  if (view.contains(event.relatedTarget) && event.relatedTarget.closest('.rl-t')) return;
  clearTimeout(timer);
  if (byPointer || card.hidden) timer = setTimeout(close, LEAVE_MS);
}
view.addEventListener('pointerout', leave);
card.addEventListener('pointerleave', leave);
card.addEventListener('pointerenter', () => clearTimeout(timer));
view.addEventListener('click', async (event) => {
  const place = tokenAt(event);
  if (place < 0 || String(getSelection())) return;
  if (pinned && place === current) { close(); return; }
  pinned = true;
  await open(place, true);
});

// From `from` in steps of `step`, the first token that is shown; -1 where there is none.
function walk(from, step) {
  for (let place = from; place >= 0 && place < tokens.length; place += step) if (shown(place)) return place;
  return -1;
}
function roundStep(step) {
  const at = rounds.indexOf(tokens[current].round);
  for (let r = at + step; r >= 0 && r < rounds.length; r += step) {
    const end = rounds[r + 1]?.start ?? tokens.length, place = walk(rounds[r].start, 1);
    if (place >= 0 && place < end) return place;
  }
  return -1;
}
const MOVES = {
  ArrowRight: () => walk(current + 1, 1),
  ArrowLeft: () => walk(current - 1, -1),
  ArrowDown: () => roundStep(1),
  ArrowUp: () => roundStep(-1),
  Home: () => walk(0, 1),
  End: () => walk(tokens.length - 1, -1),
};
view.addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !tokens.length) return;
  if (event.key === 'Escape' && !card.hidden) close();
  else if (event.key === 'Enter') {
    if (current < 0) return;
    if (card.hidden) open(current, false).then(pin); else pin();
  } else if (MOVES[event.key]) {
    // With no token chosen yet, the arrows begin with the last reply.
    const begin = current < 0 && event.key.startsWith('Arrow');
    const place = begin ? walk(tokens.findIndex((t) => t.reply === tokens.at(-1).reply), 1) : MOVES[event.key]();
    if (place >= 0) {
      const keep = pinned;
      tokens[place].el.scrollIntoView({ block: 'nearest' });
      pinned = keep;
      open(place, false);
    }
  } else return;
  event.preventDefault();
});
view.addEventListener('blur', () => { if (!pinned && !byPointer) close(); });

// Listeners on the document leave with the component.
const gone = new AbortController();
const onDocument = (type, handler, capture = false) => document.addEventListener(type, (event) => {
  if (root.isConnected) handler(event); else gone.abort();
}, { signal: gone.signal, capture, passive: true });
onDocument('keydown', (event) => { if (event.key === 'Escape' && !card.hidden) close(); });
onDocument('pointerdown', (event) => {
  if (!card.hidden && !card.contains(event.target) && !event.target.closest?.('.rl-view .rl-t')) close();
});
onDocument('scroll', (event) => {
  if (card.contains(event.target) || !event.target.contains(root)) return;
  onScroll(scroller());
  if (card.hidden || !tokens[current]) return;
  if (byPointer && !pinned) close(); else placeCard(tokens[current]);
}, true);

applyChoices();
watch('value', draw);
draw();
